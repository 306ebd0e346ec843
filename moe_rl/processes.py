"""Processes: that end with the one that started them, that suit a small model. Every room may use it; it knows none."""

import ctypes
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


OWN_COMMAND = """
import sys
from moe_rl.processes import end_with_parent
end_with_parent(int(sys.argv[1]))
from moe_rl.cli import main
main(sys.argv[2:])
"""


def command_line(arguments: Sequence[str]) -> list[str]:
    """`moe-rl ARGUMENTS` as a process that ends with this one."""
    return [sys.executable, "-c", OWN_COMMAND, str(os.getpid()), *arguments]


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Where whoever reads the output has gone (`... | head`), the command ends as one stopped by SIGPIPE does; one that
    was started without input or output (`>&-`) has empty ones."""
    _standard_streams()
    try:
        try:
            yield
        except SystemExit:  # of --help, above all
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter flushes at its end
        sys.exit(141)


def _standard_streams() -> None:
    """What is closed is /dev/null from now on: Python has no stream there, and the next file that is opened would take
    its number, and with it what libraries print. A character that the output cannot show ends nothing."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def interrupts() -> Iterator[None]:
    """Within, what fails after a Ctrl-C is a KeyboardInterrupt, in the main thread.

    Torch takes one that comes while it imports numpy for a numpy that is not there; a later import then fails on half a
    numpy, with an error of its own.
    """
    pressed = False

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def usable_cores() -> int:
    """Of this machine those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when process `parent`, which started it, is gone.

    By the kernel on Linux, at once, whatever this process is doing; elsewhere by a thread that looks every so often.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_at_once() -> NoReturn:
    """End this process with status 0, without the interpreter's own end.

    For a rank whose work is written and whose peers, where it has any, have said so too: freeing a process group or a
    sharded or DDP model there has been seen to abort, and once not to come back (gloo, torch 2.13), and the launcher
    waits for every rank.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def waiting_threads_sleep() -> None:
    """Let threads that wait for others give their core away instead of spinning; OMP_WAIT_POLICY, if set, decides.

    OpenMP reads it when torch is loaded, so this comes before. On a busy machine threads that spin hold the cores that
    those they wait for need: docs/speed.md has what that costs.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python looks for no garbage: what imports make stays, and looking through it is a fifth of their time."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


@contextmanager
def no_progress_bars(quiet: bool = False) -> Iterator[None]:
    """Inside, transformers draws none: a study has its own. quiet: nor does it warn of tensors that it did not find."""
    from transformers.utils import logging as hf_logging  # here, for processes that are to start at once

    enabled, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    if quiet:
        hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if enabled:
            hf_logging.enable_progress_bar()


SMALL = 10_000_000
"""Parameters below which a model's matrices are too small to share among threads."""


def suit_small_model() -> None:
    """One thread, and memory that is kept: what a model of fewer than `SMALL` parameters runs fastest with on a CPU.

    On a busy machine two threads, each waiting for the other, are far slower than one. OMP_NUM_THREADS, where it is
    set, decides the threads instead.
    """
    import torch  # here, for processes that are to start at once

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    keep_freed_memory()


def suit_model(model: Any) -> Any:
    """`suit_small_model` where `model` is on a CPU and has fewer than `SMALL` parameters; gives the model back."""
    if all(p.device.type == "cpu" for p in model.parameters()) and sum(p.numel() for p in model.parameters()) < SMALL:
        suit_small_model()
    return model


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for the next tensor.

    By default it gives blocks of megabytes back to the system and gets them anew, page by page, as a small model's
    forward of some thousand tokens does at every operation: a quarter to a third of its CPU time. The memory of such a
    model is small; with a large one, do not call this. Blocks of 32 MiB and more are given back all the same. glibc
    only, elsewhere nothing happens. Whether it was done.
    """
    if sys.platform != "linux":
        return False
    wanted = (M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)
    try:
        libc = ctypes.CDLL("libc.so.6")
        return all(libc.mallopt(option, value) for option, value in wanted)
    except (OSError, AttributeError):  # another C library
        return False
