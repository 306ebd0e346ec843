"""A run small enough to be saved once for every file operation, and a process that dies at one of them."""

import builtins
import os
from collections import deque

import torch
from micro import MICRO

from moe_rl.rollout.engine import ModelEngine
from moe_rl.routing import RoutedExperts
from moe_rl.runlog import RunLog
from moe_rl.training.batch import Batch
from moe_rl.training.method import resolve_method
from moe_rl.training.ranks import Ranks
from moe_rl.training.state import State


class Killed(BaseException):
    """From here on the process is dead: whatever it still tries fails, clean-up included."""


OPERATIONS = [(os, name) for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "open")] + [
    (builtins, "open")
]


def dying(monkeypatch, at, before):
    """The process dies before or after its `at`-th file operation; returns the counter of operations."""
    done = [0]

    def wrapped(operation):
        def act(*args, **options):
            if done[0] > at or (done[0] == at and before):
                done[0] = 10**9
                raise Killed
            done[0] += 1
            result = operation(*args, **options)
            if done[0] == at + 1 and not before:
                done[0] = 10**9
                raise Killed
            return result

        return act

    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    return done


def small_state(folder, step, value):
    """A run of one linear layer, one batch waiting: everything that a checkpoint holds, in milliseconds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(value)
    mask = torch.ones(1, 2, dtype=torch.bool)
    routes = RoutedExperts(torch.full((1, 2, 1, 1), step % 3), ("gate",), 3)
    logps = torch.full((1, 2), -value)
    batch = Batch(torch.ones(1, 2).long(), mask, mask, torch.ones(1), torch.ones(1), logps, routes, logps, None, step)
    return State(
        MICRO, folder, Ranks(), RunLog(folder), None, None, resolve_method(MICRO, 4), 4, model, optimizer,
        ModelEngine(model, None), waiting=deque([batch]), step=step,
    )  # fmt: skip
