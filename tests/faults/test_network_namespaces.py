"""Edge and cloud in two network namespaces, over a link that delays and drops packets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fakes.service_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def test_exact_modes_write_the_text_of_ar_decoding_over_a_slow_link() -> None:
    if os.geteuid() or not os.path.exists("/dev/net/tun"):
        pytest.skip("network namespaces need root and TUN devices")
    environment = {**os.environ, "PYTHON": sys.executable}
    script = subprocess.run(
        ["sh", "benchmarks/netns.sh", "5", "1", "1"], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    texts = [line for line in script.stdout.splitlines() if line.startswith("--temperature")]
    assert script.returncode == 0 and len(texts) == 5 and all(": same text, " in line for line in texts), texts
