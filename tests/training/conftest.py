"""Trainers of small studies."""

import pytest
from micro import judged


@pytest.fixture
def paid_by_parity(monkeypatch):
    """Every task that a trainer makes is under the Judge of `micro`."""
    from moe_rl.training import trainer

    monkeypatch.setattr(trainer, "make_task", judged(trainer.make_task))


@pytest.fixture
def trainer_of(paid_by_parity):
    """(config, folder) -> its trainer, resumed."""
    from moe_rl.training import Trainer, validate

    def build(config, folder):
        validate(config)
        made = Trainer(config, folder)
        made.resume()
        return made

    return build
