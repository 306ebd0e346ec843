"""Every function of the room that takes a mask reads one of 0 and 1 as the bool one, and refuses what is no mask."""

import pytest
import torch

from moe_rl import objectives as o

MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
A, B = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)
FUNCTIONS = {
    "token_log_ratio": lambda mask: o.token_log_ratio(A, B, mask),
    "sequence_log_ratio": lambda mask: o.sequence_log_ratio(A, B, mask),
    "policy_loss": lambda mask: o.policy_loss(o.OBJECTIVES["grpo"], A, B, REWARDS, mask).loss,
    "aggregation_weights": lambda mask: o.aggregation_weights(mask, "sequence_mean"),
    "kl_estimate": lambda mask: o.kl_estimate(A, B, mask, "k3"),
    "sequence_margin": lambda mask: o.sequence_margin(A, B, mask),
    "token_weights": lambda mask: o.token_weights(o.OBJECTIVES["gspo"], A, B, REWARDS, mask).weight,
    "sequence_truncate": lambda mask: o.sequence_truncate(A, mask, 2.0),
    "sequence_mask": lambda mask: o.sequence_mask(A, mask, 0.5, 5.0),
    "geometric_mask": lambda mask: o.geometric_mask(A, mask, 0.5, 5.0),
    "off_policy_sequence_mask": lambda mask: o.off_policy_sequence_mask(A, -B.abs(), mask, 0.1),
    "token_rewards": lambda mask: o.token_rewards(REWARDS, mask, kl_coef=0.1, logps=A, ref_logps=B),
    "generalized_advantages": lambda mask: torch.stack(o.generalized_advantages(A, B, mask)),
    "whiten": lambda mask: o.whiten(A, mask),
    "process_advantages": lambda mask: o.process_advantages(A, mask, 2),
    "value_loss": lambda mask: o.value_loss(A, B, A + B, mask),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_is_bool_or_0_and_1(name):
    function = FUNCTIONS[name]
    expected = function(MASK.bool())
    for dtype in (torch.int64, torch.uint8, torch.float32):
        assert torch.equal(function(MASK.to(dtype)), expected), dtype
    with pytest.raises(ValueError, match="only 0 and 1"):
        function(MASK * 100 - 100)  # labels
