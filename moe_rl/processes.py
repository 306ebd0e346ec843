"""Processes that end with the one that started them, however that ends. Every room may use it; it knows none."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, poll_seconds: float = 0.5) -> None:
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
            time.sleep(poll_seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
