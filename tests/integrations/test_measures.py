"""What is measured over several processes, with a second one that is played."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_rl.integrations.measures import Measures, Minibatch, ProbeBatch, Ranks, measure
from moe_rl.policy import TinyConfig, build_tiny, char_tokenizer
from moe_rl.routing import RoutedExperts, record_routes


def beside(gathered=None, reduced=None):
    """An accelerator whose second process gives these; by default what the first gives."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=True,
        num_processes=2,
        reduce=lambda values, reduction: values + (values if reduced is None else reduced),
        gather=lambda values: torch.cat([values, values if gathered is None else gathered(values)]),
        pad_across_processes=lambda values, dim: values,
    )


def minibatch(first_change):
    logps, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long)
    return Minibatch(logps, mask, torch.zeros(2), logps=logps, routed_rows=6, first_change=first_change)


@pytest.mark.parametrize(("here", "there"), [(0.01, 0.04), (0.04, 0.01)])
def test_change_at_a_first_update_is_the_largest_of_all_processes(here, there):
    log = defaultdict(list)
    ranks = Ranks(beside(lambda values: torch.full_like(values, there) if values.shape == (1,) else values))
    measures = Measures(ranks, log, sequence_clip=False)
    measures.minibatches = [minibatch(0.0), minibatch(here)]
    measures.update(1, 1, lr=0.1, aux_loss_coef=None)
    assert log["routing/first_change"] == [0.04]


def test_an_update_without_any_route_says_nothing_of_what_was_replayed():
    """Sequences that the engine gave without routes: 0 would say that routes were there and were not replayed."""
    log = defaultdict(list)
    measures = Measures(Ranks(beside()), log, sequence_clip=False)
    for routed in (0, 6):
        measures.minibatches = [replace(minibatch(0.0), routed_rows=routed)]
        measures.update(1, 1, lr=0.1, aux_loss_coef=None)
    assert log["routing/replayed_fraction"] == [0.0]


def test_no_process_waits_for_log_probabilities_that_another_does_not_have():
    """They are gathered, and a process without any would not take part."""

    def gather(values):
        raise AssertionError("the other process never comes here")

    log = defaultdict(list)
    measures = Measures(Ranks(beside(gather, reduced=1)), log, sequence_clip=False)
    routes = RoutedExperts(torch.zeros(1, 3, 1, 1, dtype=torch.long), ["gate"], 2)
    probe = ProbeBatch(lambda: (torch.zeros(1, 2), None), torch.ones(1, 2).long(), torch.zeros(1, 2), routes)
    measures.engine(routes, [probe], torch.zeros(1, 2), torch.zeros(1, 2))
    assert "routing/engine_slot_change" in log and "routing/engine_k3" not in log


def test_a_probe_without_a_token_leaves_the_mean_of_the_log_alone():
    """TRL logs means: one NaN would hide the other batches' values."""
    log = defaultdict(list)
    measures = Measures(Ranks(beside()), log, sequence_clip=False)
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    model, tokens = build_tiny(tiny, char_tokenizer("0123456789+=^$")), torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])

    def score():
        logits = model(input_ids=tokens).logits
        return logits.log_softmax(-1)[:, 1:-1].gather(2, tokens[:, 2:, None])[..., 0], None

    with torch.no_grad(), record_routes(model) as recording:
        logps = score()[0]
    for mask in (torch.zeros(2, 2).long(), torch.ones(2, 2).long()):
        probe = ProbeBatch(score, mask, logps, recording.routes)
        measures.probed(1, *measure(model, [probe], measures.ranks))
    assert log["routing/slot_change"] == log["routing/var_token_natural"] == log["routing/f2_natural"] == [0.0]
    assert not [name for name, values in log.items() if any(map(math.isnan, values))]
