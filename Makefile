# Two commands from a fresh clone:  make study   make test
PYTHON ?= python3
BIN := .venv/bin

.PHONY: study quick test test-all check figures reliability bench gpu gpu-here clean
study: .venv/.installed   ## replay against GSPO: all runs, figures, report (22 minutes on two cores)
	$(BIN)/moe-rl study experiments/replay_vs_gspo.yaml

quick: .venv/.installed   ## the same in small: one seed, fewer steps (about three minutes)
	$(BIN)/moe-rl study experiments/quick.yaml

test: .venv/.installed    ## the tests; of sweeps over families, figures and settings those that differ most
	$(BIN)/python -m pytest -n auto

test-all: .venv/.installed ## with all of the sweeps
	$(BIN)/python -m pytest -n auto -m ""

check: .venv/.installed   ## lint, format, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

figures: .venv/.installed ## redraw figures and report of the main study
	$(BIN)/moe-rl figures runs/replay_vs_gspo

reliability: .venv/.installed ## kills, faults and random input by the thousand; writes docs/reliability.md (35 CPU minutes)
	$(BIN)/python tests/reliability/campaign.py

bench: .venv/.installed   ## all CPU benchmarks (under fifteen minutes on an idle core); writes docs/benchmarks.md
	$(BIN)/python benchmarks/bench.py

gpu: gpu-here .venv-gpu/.installed ## all that needs a GPU, under thirty minutes; writes docs/gpu.md. Takes $(PYTHON)'s torch
	.venv-gpu/bin/python benchmarks/gpu.py

gpu-here:
	@command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || \
		{ echo "make gpu: no NVIDIA GPU on this machine (nvidia-smi lists none); nothing was installed or written" >&2; exit 1; }

.venv-gpu/.installed: pyproject.toml constraints.txt | gpu-here
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	grep -v '^torch==' constraints.txt >.venv-gpu/constraints.txt
	.venv-gpu/bin/python -m pip install --quiet -c .venv-gpu/constraints.txt -e ".[dev]"
	touch $@

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: the Python in .venv is older than 3.11. make clean, then make quick PYTHON=python3.12" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-gpu
