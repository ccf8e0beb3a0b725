"""A slow link between two network namespaces, for a kernel without netem: ``python benchmarks/relay.py``.

A TUN device for each; what one end sends is held for a while and handed to the other, or dropped. Packets may overtake
one another where there is jitter. Knows packets only; needs the right to make devices. Used by ``netns.sh``.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
LONGEST = 1 << 16


def device(name: str, namespace: str, address: str, other: str) -> int:
    """A TUN device called `name`, up in `namespace`; the descriptor that its packets pass through."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        ["ip", "link", "set", name, "netns", namespace],
        ["ip", "-n", namespace, "addr", "add", address, "peer", other, "dev", name],
        ["ip", "-n", namespace, "link", "set", name, "up"],
    ):
        subprocess.run(command, check=True)
    return tun


def relay(ends: tuple[int, int], delay_s: float, jitter_s: float, loss: float, seed: int = 0) -> None:
    """Hand packets on for ever: each takes `delay_s` and up to `jitter_s` more, and a share of `loss` is dropped."""
    rng, other = random.Random(seed), dict(zip(ends, reversed(ends), strict=True))
    held: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, where to
    number = 0
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for end in select.select(ends, (), (), wait)[0]:
            packet = os.read(end, LONGEST)
            if rng.random() >= loss:
                due = time.monotonic() + delay_s + jitter_s * rng.random()
                heapq.heappush(held, (due, number, other[end], packet))
                number += 1
        while held and held[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(held)
            os.write(end, packet)


def main() -> None:
    """Make both devices, say so, and relay until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("edge", help="namespace; its address will be 10.77.0.1")
    parser.add_argument("cloud", help="namespace; its address will be 10.77.0.2")
    parser.add_argument("--delay-ms", type=float, default=15.0, help="each way")
    parser.add_argument("--jitter-ms", type=float, default=2.0, help="up to so much more, each way")
    parser.add_argument("--loss-percent", type=float, default=1.0, help="of packets, each way")
    options = parser.parse_args()
    ends = (
        device("specdemo-e", options.edge, "10.77.0.1", "10.77.0.2"),
        device("specdemo-c", options.cloud, "10.77.0.2", "10.77.0.1"),
    )
    print("relaying", flush=True)
    relay(ends, options.delay_ms / 1000, options.jitter_ms / 1000, options.loss_percent / 100)


if __name__ == "__main__":
    main()
