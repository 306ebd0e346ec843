"""Settings of all tests: threads, signals, garbage collection, hypothesis, type checks."""

import gc
import importlib
import os
import signal

import hypothesis
import torch
import typechecks

collect_ignore_glob = [
    "*/conftest.py",  # without doctests; two files of one name would end `pytest tests/a tests/b`
    "*/fake_vllm/*",  # for other processes: imported here, TRL would take it for vLLM
]

gc.disable()  # while modules are imported and tests collected, because these objects stay anyway
typechecks.check_arrays_only()
if "PYTEST_XDIST_WORKER" in os.environ:
    # Libraries that the package imports while jaxtyping's import hook is active get a separate bytecode cache, which a
    # new environment lacks. That costs each test process ten CPU seconds, unless the libraries are imported before.
    for name in ("matplotlib.figure", "pandas", "scipy.stats", "transformers.modeling_utils"):
        importlib.import_module(name)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # slow tests first


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
