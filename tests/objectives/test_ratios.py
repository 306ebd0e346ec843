from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

from moe_rl.objectives import OBJECTIVES, policy_loss, sequence_log_ratio, token_log_ratio
from moe_rl.objectives.ratios import as_bool_mask, log_ratio_at_level

NAN, INF = float("nan"), float("inf")


def double(rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


def test_golden_with_garbage_in_padding():
    # row 0: -1.0 - -1.5 = 0.5, -2.0 - -2.1 = 0.1, mean 0.3; row 1: one token, -3.0 - -2.0 = -1.0; row 2: empty
    logps = double([[-1.0, -2.0, NAN], [INF, -3.0, 7.0], [NAN, NAN, -INF]], requires_grad=True)
    old = double([[-1.5, -2.1, -INF], [NAN, -2.0, NAN], [INF, NAN, 0.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    ratio = token_log_ratio(logps, old, mask)
    torch.testing.assert_close(ratio, double([[0.5, 0.1, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))
    per_sequence = sequence_log_ratio(logps, old, mask)
    torch.testing.assert_close(per_sequence, double([0.3, -1.0, 0.0]))
    per_sequence.sum().backward()
    # d mean / d token: 1/2, 1/2 in row 0; 1 in row 1; nothing in padding
    torch.testing.assert_close(logps.grad, double([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_all_kinds_agree(dtype):
    mask = torch.tensor([[1, 0, 1]])
    logps, old = double([[-1.0, -2.0, -3.0]]), double([[-1.5, -2.5, -2.0]])
    assert torch.equal(token_log_ratio(logps, old, mask.to(dtype)), double([[0.5, 0.0, -1.0]]))


def test_a_weight_is_no_mask():
    with pytest.raises(ValueError, match="only 0 and 1"):
        as_bool_mask(torch.tensor([[0.5, 1.0]]))


def test_half_precision_is_subtracted_in_float32():
    # bfloat16 holds -8.0 and -8.0625 exactly; their difference must not be rounded
    logps = torch.tensor([[-8.0]], dtype=torch.bfloat16)
    ratio = token_log_ratio(logps, torch.tensor([[-8.0625]], dtype=torch.bfloat16), torch.tensor([[True]]))
    assert ratio.dtype == torch.float32 and ratio.item() == 0.0625


def test_no_gradient_reaches_the_old_policy():
    logps, old = double([[-1.0]], requires_grad=True), double([[-2.0]], requires_grad=True)
    token_log_ratio(logps, old, torch.tensor([[True]])).sum().backward()
    assert old.grad is None and logps.grad.item() == 1.0


def test_levels():
    # log w = 0.4, 0.0 -> log s = 0.2. "sequence": both tokens move s by 1/2 each, over two tokens: 1 each.
    # "sequence_token": the value of s, each token moves only its own.
    mask = torch.tensor([[True, True, False]])
    for level, value, slope in (
        ("token", [0.4, 0.0, 0.0], [3.0, 5.0, 0.0]),
        ("sequence", [0.2, 0.2, 0.0], [4.0, 4.0, 0.0]),  # (3 + 5)/2
        ("sequence_token", [0.2, 0.2, 0.0], [3.0, 5.0, 0.0]),
    ):
        logps = double([[-1.0, -1.0, NAN]], requires_grad=True)
        leveled = log_ratio_at_level(token_log_ratio(logps, double([[-1.4, -1.0, 0.0]]), mask), mask, level)
        torch.testing.assert_close(leveled, double([value]))
        (leveled * double([[3.0, 5.0, 9.0]])).sum().backward()
        torch.testing.assert_close(logps.grad, double([slope]))


def test_an_unknown_level_is_refused():
    with pytest.raises((ValueError, TypeCheckError), match="sequence_token"):
        log_ratio_at_level(torch.zeros(1, 1), torch.tensor([[True]]), "seq")


def test_a_router_shift_weight_of_0_takes_its_sequence_out_of_the_gradient_at_every_level():
    """gamma = 0 makes log w -inf: the token's ratio is 0, and so is that of its sequence."""
    logps = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], requires_grad=True)
    gamma = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    for ratio in ("sequence", "sequence_token"):
        objective = replace(OBJECTIVES["gspo"], ratio=ratio, route_weight="before_clip")
        out = policy_loss(objective, logps, logps.detach(), torch.ones(2), torch.ones(2, 2), route_weight=gamma)
        (slope,) = torch.autograd.grad(out.loss, logps)
        assert out.loss.item() == -0.5 and slope.tolist() == [[0.0, 0.0], [-0.25, -0.25]], ratio
