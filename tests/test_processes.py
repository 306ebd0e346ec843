"""What processes do with memory that is freed."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from moe_rl.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):  # 80 MiB at a time: more than glibc keeps by itself
        [torch.zeros(2**22) for _ in range(5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(3))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept():
    """5 x 16 MiB of 4 KiB pages: up to 20,480 faults a round where it is given back, none where it is kept."""
    counts = {}
    for mode in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        counts[mode] = int(done.stdout)
    assert counts["keep"] < 500 < counts["default"]
