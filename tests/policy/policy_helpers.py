"""A small task, its tokenizer, small models, and how tests compare and damage them."""

import torch

from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import ColdStartConfig, TinyConfig, char_tokenizer, cold_start
from moe_rl.rollout import TaskConfig, make_task

TASK = make_task(TaskConfig("copy", {"length": 2, "symbols": "abcd"}))
TOKENIZER = char_tokenizer(TASK.alphabet)
SMALL = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=4, moe_intermediate_size=8)
START = ColdStartConfig(steps=3, batch_size=8, warmup_steps=1)
CONFIG = ModelConfig(tiny=SMALL, cold_start=START)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def learning(reward_at, monkeypatch):
    """A held-out reward that follows the steps taken, for rules about when to stop."""
    rewards = iter(reward_at)
    monkeypatch.setattr(f"{cold_start.__module__}.pass_at_1", lambda *_: next(rewards))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
