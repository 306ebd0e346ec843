"""Shared test settings."""

import gc
import importlib
import os
import signal

import hypothesis
import torch
import typechecks

collect_ignore_glob = [
    "*/conftest.py",  # they hold no doctests, and two of one name end `pytest tests/a tests/b`
    "*/fake_vllm/*",  # for processes of their own: imported here it would be the vLLM that TRL finds
]

gc.disable()  # while all is imported and collected: what comes of it stays
typechecks.check_arrays_only()
if "PYTEST_XDIST_WORKER" in os.environ:
    # What modules of the package import while their types are being hooked has a bytecode cache of its own, which a new
    # environment does not have: ten CPU seconds for each process of the tests, unless it is imported before.
    for name in ("matplotlib.figure", "pandas", "scipy.stats", "transformers.modeling_utils"):
        importlib.import_module(name)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # else one process ends alone with them


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# A background job (`make test &`) ignores Ctrl-C, and so would every process that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared machines stall: a deadline would fail a property for the neighbour's load.
hypothesis.settings.register_profile("moe_rl", deadline=None)
hypothesis.settings.load_profile("moe_rl")

# One thread is the fastest for models this small, and the reproducible choice.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
