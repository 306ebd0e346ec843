"""What processes do with memory that is freed."""

import platform
import subprocess
import sys

TRY = """
from moe_rl.processes import keep_freed_memory
import torch
print(keep_freed_memory())
print(float(torch.ones(2**20).sum()))
"""


def test_the_c_library_takes_the_settings():
    """A value that glibc refuses (a threshold above half of its largest heap, say) changes nothing and says nothing."""
    done = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(platform.libc_ver()[0] == "glibc"), str(2.0**20)]
