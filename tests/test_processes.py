"""What suits a small model: one thread, and memory that is kept."""

import os
import platform
import subprocess
import sys

TRY = """
from moe_rl.processes import keep_freed_memory
import torch
print(keep_freed_memory())
print(float(torch.ones(2**20).sum()))
"""


THREADS = """
import torch
from moe_rl.processes import suit_small_model
torch.set_num_threads(2)
suit_small_model()
print(torch.get_num_threads())
"""


def printed(program, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | variables
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_small_model_takes_one_thread_unless_the_user_said_otherwise():
    assert printed(THREADS) == ["1"]
    assert printed(THREADS, OMP_NUM_THREADS="2") == ["2"]


def test_the_c_library_takes_the_settings():
    """A value that glibc refuses (a threshold above half of its largest heap, say) changes nothing and says nothing."""
    assert printed(TRY) == [str(platform.libc_ver()[0] == "glibc"), str(2.0**20)]
