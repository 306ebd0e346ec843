"""What an engine of a user's own returns is checked before anything is trained on it."""

import random

import pytest
import torch

from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import make_task
from moe_rl.rollout.engine import ModelEngine
from moe_rl.rollout.engines import EngineConfig, EngineError, make_engine
from moe_rl.rollout.tasks import TaskConfig

TASK = make_task(TaskConfig(name="mod_chain", options={"steps": 1}))
TOKENIZER = char_tokenizer(TASK.alphabet)


@pytest.fixture(scope="module")
def model():
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    return build_tiny(tiny, TOKENIZER)


def respond(engine):
    problems = [TASK.problem(random.Random(seed)) for seed in range(3)]
    generator = torch.Generator().manual_seed(1)
    return engine.sample(problems, group_size=4, max_new_tokens=7, temperature=1.0, generator=generator)


@pytest.mark.parametrize("order", [slice(4, None), slice(None, None, -1)], ids=["a group is missing", "exchanged"])
def test_responses_that_are_not_those_asked_for_are_refused_of_an_own_engine(model, tmp_path, order):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from moe_rl.rollout.engine import ModelEngine\n"
        "class Own(ModelEngine):\n"
        "    rows = slice(None)\n"
        "    def sample(self, problems, **options):\n"
        "        whole = super().sample(problems, **options)\n"
        "        return whole.rows(torch.tensor(range(len(whole))[self.rows]))\n"
    )
    engine = make_engine(EngineConfig(kind=f"{tmp_path / 'own.py'}:Own"), model, TOKENIZER)
    assert torch.equal(respond(engine).input_ids, respond(ModelEngine(model, TOKENIZER)).input_ids)
    engine.rows = order
    with pytest.raises(EngineError, match=r"own\.py:Own\.sample was asked for 3 problems x 4 responses and gave"):
        respond(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("logps=-whole.logps", " gave a log-probability of .* nats; drawn tokens have finite ones <= 0"),
        ("finished=~whole.finished", ": row 0 has finished=(True|False), its last token says otherwise"),
        ("input_ids=whole.input_ids + 99", r" gave token ids from \d+ to \d+; the model has 0 to \d+"),
    ],
)
def test_a_wrong_rollout_of_an_own_engine_is_refused(model, tmp_path, changes, message):
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from moe_rl.rollout.engine import ModelEngine\n"
        "class Own(ModelEngine):\n"
        "    def sample(self, problems, **options):\n"
        "        whole = super().sample(problems, **options)\n"
        f"        return replace(whole, {changes})\n"
    )
    engine = make_engine(EngineConfig(kind=f"{tmp_path / 'own.py'}:Own"), model, TOKENIZER)
    with pytest.raises(EngineError, match=rf"own\.py:Own\.sample{message}"):
        respond(engine)
