"""Slow link between two network namespaces for kernels without netem, used by `netns.sh` (docs/edge-cloud.md).

Packets between two TUN devices are delayed or dropped; jitter may reorder them. Requires the right to create devices.
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
MAX_PACKET_BYTES = 1 << 16


def device(name: str, namespace: str, address: str, other: str) -> int:
    """Create the TUN device `name` in `namespace` and return its file descriptor."""
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
    """Forward packets forever, each after `delay_s` plus up to `jitter_s`; drop a share of `loss`."""
    rng, receiver = random.Random(seed), dict(zip(ends, reversed(ends), strict=True))
    queue: list[tuple[float, int, int, bytes]] = []  # due time, number, receiver, packet
    number = 0
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for end in select.select(ends, (), (), wait)[0]:
            packet = os.read(end, MAX_PACKET_BYTES)
            if rng.random() >= loss:
                due = time.monotonic() + delay_s + jitter_s * rng.random()
                heapq.heappush(queue, (due, number, receiver[end], packet))
                number += 1
        while queue and queue[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(queue)
            os.write(end, packet)


def main() -> None:
    """Create both devices, print `relaying` and forward packets until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("edge", help="namespace with address 10.77.0.1")
    parser.add_argument("cloud", help="namespace with address 10.77.0.2")
    parser.add_argument("--delay-ms", type=float, default=15.0, help="each way")
    parser.add_argument("--jitter-ms", type=float, default=2.0, help="maximum additional delay, each way")
    parser.add_argument("--loss-percent", type=float, default=1.0, help="share of packets, each way")
    options = parser.parse_args()
    ends = (
        device("specdemo-e", options.edge, "10.77.0.1", "10.77.0.2"),
        device("specdemo-c", options.cloud, "10.77.0.2", "10.77.0.1"),
    )
    print("relaying", flush=True)
    relay(ends, options.delay_ms / 1000, options.jitter_ms / 1000, options.loss_percent / 100)


if __name__ == "__main__":
    main()
