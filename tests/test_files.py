"""Files written whole or not at all, and folders with one writer."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moe_rl import files
from moe_rl.files import (
    InUseError,
    atomic_file,
    one_at_a_time,
    sole_writer,
    still_written,
    sweep,
    write_atomic,
    write_tensors,
)

HOLD = """
import sys, time
from pathlib import Path
from moe_rl.files import sole_writer
with sole_writer(Path(sys.argv[1]), "moe-rl run x"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_an_error_names_the_file(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system", "/somewhere/.a.x7f3.tmp")

    with monkeypatch.context() as refusing, pytest.raises(OSError, match=r"Read-only file system: '.*/a'"):
        refusing.setattr("tempfile.mkstemp", refuse)  # even a temporary name cannot be had
        write_atomic(tmp_path / "a", "text")
    with pytest.raises(OSError, match=r"a\.safetensors"):
        (tmp_path / "a.safetensors").mkdir()
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_what_an_interrupted_write_left_is_swept(tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / ".step.parquet.abc.tmp").touch()
    (tmp_path / "kept.tmp").touch()
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["kept.tmp", "tokens"]


def test_one_writer_a_folder_and_the_lock_dies_with_its_holder(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(InUseError, match=rf"process {holder.pid} on .*moe-rl run x.*Wait until"),
            sole_writer(tmp_path),
        ):
            pass
    finally:
        assert still_written(tmp_path)
        holder.kill()
        holder.wait()
    assert still_written(tmp_path) is False
    with sole_writer(tmp_path, "the next one"):
        assert "the next one" in (tmp_path / ".lock").read_text()
        assert still_written(tmp_path)
    assert still_written(tmp_path) is False, "let go of, by a process that lives"


def test_what_fails_while_a_folder_is_locked_names_its_own_file(tmp_path):
    with pytest.raises(OSError) as failed, sole_writer(tmp_path):
        (tmp_path / "nowhere" / "engine.conf").read_text()
    assert failed.value.filename == str(tmp_path / "nowhere" / "engine.conf")
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    with pytest.raises(OSError) as failed, sole_writer(tmp_path / "other"):
        pass
    assert failed.value.filename == str(tmp_path / "other" / ".lock")


def test_a_writer_of_another_machine_or_none_is_not_judged(tmp_path):
    assert still_written(tmp_path) is None
    (tmp_path / ".lock").write_text("process 1 on elsewhere, since 2026-01-01 00:00:00: moe-rl run")
    assert still_written(tmp_path) is None


PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it for all below
child = subprocess.Popen([sys.executable, "-c", '''
import sys, time
from moe_rl.processes import end_with_parent
sys.platform = sys.argv[2]
end_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
''', str(os.getpid()), sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize(
    ("number", "platform"),
    [("SIGKILL", sys.platform), ("SIGTERM", sys.platform), ("SIGHUP", sys.platform), ("SIGKILL", "darwin")],
)
def test_a_process_ends_with_the_one_that_started_it(number, platform):
    """By the kernel on Linux; as elsewhere, by looking."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, platform], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.Signals[number])
    parent.wait()
    deadline = time.monotonic() + 100
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(files.fcntl is None, reason="there are no locks")
@pytest.mark.parametrize("said", [errno.ENOLCK, errno.ENOSYS])  # Lustre without flock says the second
def test_where_a_file_system_has_no_locks_work_goes_on_without(tmp_path, monkeypatch, said):
    def none_such(*_):
        raise OSError(said, "none")

    monkeypatch.setattr(files.fcntl, "flock", none_such)
    done = []
    with one_at_a_time(tmp_path / "lock"), sole_writer(tmp_path / "run"):
        done.append("both")
    assert done == ["both"]
