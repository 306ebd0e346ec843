"""What suits a small model: one thread, and memory that is kept."""

import gc
import os
import platform
import subprocess
import sys

import pytest
import torch

from moe_rl.processes import importing, suit_model

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


WAIT = """
from moe_rl.cli import main
main(["--version"])
import torch
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of GNU's OpenMP")
def test_threads_that_wait_sleep_unless_the_user_said_otherwise():
    """OpenMP itself says what it took, when torch loads it."""

    def said(**variables):
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        environment |= {"OMP_DISPLAY_ENV": "true", **variables}
        return subprocess.run([sys.executable, "-c", WAIT], env=environment, capture_output=True, text=True).stderr

    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said()
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said(OMP_WAIT_POLICY="active")


def test_threads_suit_the_size_of_a_model(monkeypatch):
    called = []
    monkeypatch.setattr("moe_rl.processes.suit_small_model", lambda: called.append(True))
    monkeypatch.setattr("moe_rl.processes.SMALL", 100)
    small, large = torch.nn.Linear(9, 9), torch.nn.Linear(10, 10)
    assert suit_model(large) is large and not called
    assert suit_model(small) is small and called == [True]
    suit_model(small.to("meta"))
    assert called == [True], "on another device"


def test_garbage_is_looked_for_again_after_imports():
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled(), "whoever disabled it enables it"
    finally:
        gc.enable()


CLOSED = """
import os, sys
from moe_rl.processes import ends_with_its_reader
with ends_with_its_reader():
    print("nobody reads this")
    with open(sys.argv[1], "w") as file:
        print(file.fileno() > 2, sys.stdin.read() == "", file=file)
        os.write(1, b"by a library")
        os.write(2, b"by a library")
"""


@pytest.mark.skipif(os.name == "nt", reason="of a Unix shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_without_standard_streams_nothing_is_printed_into_a_file(closed, tmp_path):
    """A file that is opened takes the lowest free number, be it that of the output."""
    command = f'exec "$0" -c "$1" "$2" {closed}'
    words = ["sh", "-c", command, sys.executable, CLOSED, str(tmp_path / "file")]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    assert (tmp_path / "file").read_text() == "True True\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_has_gone_ends_the_command_quietly():
    for words, unbuffered in ((["--help"], ""), (["--help"], "1"), (["run", "--help"], ""), (["--version"], "")):
        command, environ = [sys.executable, "-m", "moe_rl", *words], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (141, "")


def test_what_the_output_cannot_show_ends_nothing():
    program = 'import moe_rl.processes as p\nwith p.ends_with_its_reader(): print("a\u2212b")'
    assert printed(program, PYTHONIOENCODING="ascii") == ["a\\u2212b"]
