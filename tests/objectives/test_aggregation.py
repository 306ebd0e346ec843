import pytest
import torch
from jaxtyping import TypeCheckError

from moe_rl.objectives import aggregation_weights
from moe_rl.objectives.ratios import weighted_sum

MASK = torch.tensor([[True, True, True, False], [False] * 4, [True, False, False, False]])


@pytest.mark.parametrize(
    ("how", "options", "long", "short"),
    [  # N = 2 rows with tokens, M = 4 tokens, lengths 3 and 1
        ("sequence_mean", {}, 1 / 6, 1 / 2),
        ("token_mean", {}, 1 / 4, 1 / 4),
        ("sum", {}, 1 / 2, 1 / 2),
        ("constant", {"length_constant": 8.0}, 1 / 16, 1 / 16),
        ("sequence_mean", {"total_sequences": 5}, 1 / 15, 1 / 5),
        ("token_mean", {"total_tokens": 10, "total_sequences": 5}, 1 / 10, 1 / 10),
        ("token_mean", {"local_normalizer": True, "total_sequences": 5}, 1 / 4 * 2 / 5, 1 / 4 * 2 / 5),
        ("sum", {"total_sequences": torch.tensor(5)}, 1 / 5, 1 / 5),
        ("constant", {"length_constant": 8.0, "total_sequences": 5}, 1 / 40, 1 / 40),
    ],
)
def test_golden(how, options, long, short):
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, :3], expected[2, 0] = long, short
    torch.testing.assert_close(aggregation_weights(MASK, how, **options), expected)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "sum", "constant"])
def test_nothing_unmasked_is_zero_with_a_graph(how):
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    total = weighted_sum(values, aggregation_weights(nothing, how, dtype=torch.float32), nothing)
    total.backward()
    assert total.item() == 0.0
    assert values.grad is not None and torch.equal(values.grad, torch.zeros(2, 3))


def test_unknown_name():
    with pytest.raises((ValueError, TypeCheckError), match="sequence_mean"):
        aggregation_weights(MASK, "mean")
