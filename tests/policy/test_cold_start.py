"""Cold starts: what they learn, when they stop, and what they refuse."""

import time
from dataclasses import replace

import pytest
import torch
from policy_helpers import CONFIG, SMALL, START, TASK, TOKENIZER, equal, learning

from moe_rl.policy.models import load_policy
from moe_rl.policy.tiny import (
    ColdStartConfig,
    ModelError,
    build_tiny,
    cold_start,
    demonstration_batch,
    router_parameters,
)
from moe_rl.rollout import Problem, TaskError, VerifiableTask


def test_demonstration_batch_labels_the_completion_and_its_end():
    ids, mask, labels = demonstration_batch(TOKENIZER, ["^ab=", "^a="], ["ab", ""])
    text = [TOKENIZER.convert_ids_to_tokens(row) for row in ids.tolist()]
    assert text == [[*"^ab=ab$"], [*"^a=$", "<pad>", "<pad>", "<pad>"]]
    assert mask.tolist() == [[1] * 7, [1] * 4 + [0] * 3]
    ignored = -100
    a, b, end = TOKENIZER("ab$")["input_ids"]
    assert labels.tolist() == [[ignored] * 4 + [a, b, end], [ignored] * 3 + [end] + [ignored] * 3]


def test_cold_start_learns_the_task():
    model = build_tiny(replace(SMALL, hidden_size=32), TOKENIZER)
    config = ColdStartConfig(steps=120, batch_size=32, learning_rate=1e-2, demonstration_noise=0.0)
    seen = []
    result = cold_start(model, TOKENIZER, TASK, config, lambda *args: seen.append(args))
    assert seen == [(i + 1, 120, loss) for i, loss in enumerate(result["loss"])]
    assert result["loss"][0] > 1.5 and result["loss"][-1] < 0.2
    assert result["pass@1"] > 0.8
    # Top-2 of 4 experts: the balance loss E * sum f_e p_e is 2 when balanced, 4 at worst.
    assert 1.9 < result["aux_loss"][-1] < 2.6


def test_a_cold_start_ends_at_its_reward_and_checks_change_nothing(monkeypatch):
    fixed, stopped = build_tiny(SMALL, TOKENIZER), build_tiny(SMALL, TOKENIZER)
    cold_start(fixed, TOKENIZER, TASK, replace(START, steps=4))
    checked = replace(START, steps=9, check_every=2, until_reward=0.4)
    sampled = cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(checked, steps=4, check_problems=8))
    assert [step for step, _ in sampled["checks"]] == [2, 4] and sampled["pass@1"] == sampled["checks"][-1][1]
    learning([0.39, 0.4], monkeypatch)
    result = cold_start(stopped, TOKENIZER, TASK, checked)
    assert result["steps"] == len(result["loss"]) == 4 and result["reached"]
    assert result["checks"] == [[2, 0.39], [4, 0.4]] and result["pass@1"] == 0.4
    assert equal(fixed, stopped) and not stopped.training


def test_the_last_step_of_a_cold_start_is_checked_too(monkeypatch):
    learning([0.1, 0.5], monkeypatch)
    result = cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(START, check_every=2, until_reward=0.4))
    assert result["checks"] == [[2, 0.1], [3, 0.5]] and result["reached"]


def test_cold_start_is_reproducible_bit_for_bit():
    models = [build_tiny(SMALL, TOKENIZER) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.rand(3)  # whatever torch's own generator does
        cold_start(model, TOKENIZER, TASK, replace(START, seed=seed))
    assert equal(models[0], models[1]) and not equal(models[0], models[2])


def test_a_frozen_router_stays_and_can_be_trained_later():
    model, before = build_tiny(SMALL, TOKENIZER), build_tiny(SMALL, TOKENIZER)
    cold_start(model, TOKENIZER, TASK, replace(START, freeze_router=True, aux_loss_coef=0.0))
    routers = {id(p) for p in router_parameters(model)}
    for (name, a), b in zip(model.named_parameters(), before.parameters(), strict=True):
        moved = not torch.equal(a, b)
        assert moved != (id(a) in routers), name
        assert a.requires_grad and a.grad is None


def test_a_cold_start_that_diverges_stops():
    with pytest.raises(ModelError, match=r"the loss is nan at step .*learning_rate"):
        model = build_tiny(SMALL, TOKENIZER)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        cold_start(model, TOKENIZER, TASK, START)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "model.cold_start.steps: expected a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "model.cold_start.batch_size: expected a whole number of at least 1, got 0"),
        (
            {"until_reward": 1.5},
            r"model.cold_start.until_reward: expected a finite number above 0 and of at most 1, got 1\.5",
        ),
        ({"check_every": 0}, "model.cold_start.check_every: expected a whole number of at least 1, got 0"),
        ({"check_problems": 0}, "model.cold_start.check_problems: expected a whole number of at least 1, got 0"),
        ({"learning_rate": 0.0}, r"model.cold_start.learning_rate: expected a finite number above 0, got 0\.0"),
        (
            {"demonstration_noise": 2.0},
            r"demonstration_noise: expected a finite number of at least 0 and of at most 1, got 2\.0",
        ),
    ],
)
def test_impossible_cold_starts_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(START, **change))


class Mute(VerifiableTask):
    name, alphabet, max_new_tokens = "mute", "0123456789", 2

    def draw(self, rng):
        return Problem(f"^{rng.randrange(1000)}", "0")

    def reward(self, problem, completion):
        return 1.0


@pytest.mark.parametrize("part", ["problem", "demonstration"])
def test_a_task_that_fails_in_a_cold_start_is_named(part, monkeypatch):
    monkeypatch.setattr(type(TASK), part, lambda *_, **options: {}["no such key"])
    with pytest.raises(TaskError, match=rf"task copy, {part}: KeyError: 'no such key'"):
        cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, START)


def test_a_demonstration_that_is_no_text_is_refused(monkeypatch):
    """An answer that a task of one's own left a number, for example."""
    monkeypatch.setattr(type(TASK), "demonstration", lambda *_: 5)
    with pytest.raises(TaskError, match=r"^task copy, demonstration: expected a text, got 5$"):
        cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, START)


def test_a_verifier_that_hangs_in_a_check_of_a_cold_start_is_stopped(monkeypatch):
    monkeypatch.setattr(type(TASK), "reward", lambda *_: time.sleep(0.5) or 0.0)
    short = replace(START, steps=1, check_problems=1)
    with pytest.raises(TaskError, match=r"task copy, reward: did not return within 0\.1 seconds .*completion '"):
        cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, short, seconds=0.1)


def test_a_task_without_demonstrations_says_what_to_do():
    with pytest.raises(ModelError, match=r"task mute has no demonstration.*model.cold_start to null"):
        load_policy(CONFIG, Mute())
    model, tokenizer = load_policy(replace(CONFIG, cold_start=None), Mute())
    assert equal(model, build_tiny(SMALL, tokenizer))
