"""Processes that end with the process that started them, handle Ctrl-C, and run small models fast. Every subpackage may
import this module; it imports none of them."""

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
    """Return the command of a process that runs `moe-rl ARGUMENTS` and ends with this process."""
    return [sys.executable, "-c", OWN_COMMAND, str(os.getpid()), *arguments]


def signal_name(number: int) -> str:
    """Return the name of a signal; Python has none for most real-time signals.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Context manager and decorator: if the reader of the output has gone (`... | head`), end the command as one
    stopped by SIGPIPE. A command that was started without input or output (`>&-`) gets empty ones."""
    _standard_streams()
    try:
        try:
            yield
        except SystemExit:  # mostly that of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what the interpreter flushes at its end
        sys.exit(141)


def _standard_streams() -> None:
    """Replace closed standard streams by /dev/null, and print characters that the output cannot show as escapes.

    Python has no stream for a closed one, and the next file that is opened would take its number and receive what
    libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is that of the closed stream
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def interrupts() -> Iterator[None]:
    """Context manager: turn any exception of the block after a Ctrl-C into a KeyboardInterrupt, in the main thread.

    If a KeyboardInterrupt arrives while torch imports numpy, torch takes numpy for missing; a later import then fails
    on a half-imported numpy, with an error of its own."""
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
    """Return how many cores of this machine this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """Make this process end when process `parent`, which started it, is gone.

    On Linux the kernel kills this process at once, whatever it is doing; elsewhere a thread looks twice a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was gone before this call
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_at_once() -> NoReturn:
    """End this process with status 0, without the interpreter's shutdown.

    For a rank whose work is written and whose peers, if any, have confirmed theirs: freeing a process group or a
    sharded or DDP model in the shutdown has been seen to abort, and once to hang (gloo, torch 2.13), while the launcher
    waits for every rank."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def waiting_threads_sleep() -> None:
    """Make threads that wait for others give their core away instead of spinning; OMP_WAIT_POLICY, if set, decides.

    OpenMP reads the variable when torch is loaded, so call this before. On a busy machine, spinning threads hold the
    cores that the threads they wait for need; docs/speed.md has the cost of that."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextmanager
def importing() -> Iterator[None]:
    """Context manager: switch the garbage collector off. What imports create stays in use, and collecting would take a
    fifth of the time of the imports."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


@contextmanager
def no_progress_bars(quiet: bool = False) -> Iterator[None]:
    """Context manager: switch off the progress bars of transformers, because a study shows its own. quiet: switch off
    warnings as well, such as those of tensors that were not found."""
    from transformers.utils import logging as hf_logging  # here, so that processes without it start at once

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
"""Number of parameters below which a model's matrices are too small to be shared among threads."""


def suit_small_model() -> None:
    """Set this process up as a model of fewer than `SMALL` parameters runs fastest on a CPU: one thread, freed memory
    kept.

    On a busy machine, two threads that wait for each other are far slower than one. OMP_NUM_THREADS, if set, decides
    the number of threads instead."""
    import torch  # here, so that processes without it start at once

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    keep_freed_memory()


def suit_model(model: Any) -> Any:
    """Call `suit_small_model` if `model` is on a CPU and has fewer than `SMALL` parameters; return the model."""
    if all(p.device.type == "cpu" for p in model.parameters()) and sum(p.numel() for p in model.parameters()) < SMALL:
        suit_small_model()
    return model


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next tensors; return whether that was done.

    By default the C library gives blocks of megabytes back to the system and gets them anew, page by page. The forward
    of a small model on some thousand tokens does so at every operation, for a quarter to a third of its CPU time. The
    memory of such a model is small; do not call this with a large one. Blocks of 32 MiB and more are given back all the
    same. With another C library than glibc nothing happens."""
    if sys.platform != "linux":
        return False
    wanted = (M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)
    try:
        libc = ctypes.CDLL("libc.so.6")
        return all(libc.mallopt(option, value) for option, value in wanted)
    except (OSError, AttributeError):  # another C library
        return False
