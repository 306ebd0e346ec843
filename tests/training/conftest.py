"""Runs of small studies."""

import pytest
from micro import judged

from moe_rl.training import begin, resume, validate


@pytest.fixture
def paid_by_parity(monkeypatch):
    """Every task that a run makes is under the Judge of `micro`."""
    from moe_rl.training import setup

    monkeypatch.setattr(setup, "make_task", judged(setup.make_task))


@pytest.fixture
def state_of(paid_by_parity):
    """(config, folder) -> the run's state, resumed."""

    def build(config, folder):
        validate(config)
        state = begin(config, folder)
        resume(state)
        return state

    return build
