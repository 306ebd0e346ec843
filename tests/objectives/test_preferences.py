import math

import pytest
import torch

from moe_rl.objectives import dpo_coefficients, dpo_loss, historical_sample, reward_model_loss, sequence_margin


def double(rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


def test_dpo_golden():
    # margins 2 and -1, beta 0.5: -log sigma(1.5) = log(1 + e^-1.5); coefficient sigma(-1.5)
    loss = dpo_loss(double([2.0]), double([-1.0]), beta=0.5)
    torch.testing.assert_close(loss, double(math.log1p(math.exp(-1.5))))
    torch.testing.assert_close(
        dpo_coefficients(double([2.0]), double([-1.0]), beta=0.5), double([1 / (1 + math.exp(1.5))])
    )


def test_the_gradient_of_dpo_is_plus_and_minus_beta_times_the_coefficient():
    beta = 0.3
    chosen = double([[-1.0, -2.0], [-0.5, float("nan")]], requires_grad=True)
    rejected = double([[-0.3, -0.2], [-4.0, -1.0]], requires_grad=True)
    mask_c, mask_r = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 1], [1, 1]])
    margin_c = sequence_margin(chosen, double([[-1.5, -1.0], [-1.0, 0.0]]), mask_c)
    margin_r = sequence_margin(rejected, double([[-1.0, -1.0], [-1.0, -1.0]]), mask_r)
    torch.testing.assert_close(margin_c, double([-0.5, 0.5]))  # 0.5 - 1.0; 0.5
    dpo_loss(margin_c, margin_r, beta).backward()
    coefficient = beta * dpo_coefficients(margin_c, margin_r, beta)[:, None] / 2  # a mean over two pairs
    torch.testing.assert_close(chosen.grad, -coefficient * mask_c)
    torch.testing.assert_close(rejected.grad, coefficient * mask_r)


def test_reward_model_loss_is_dpo_of_scores():
    a, b = double([1.0, 0.0]), double([0.0, 2.0])
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(2.0))) / 2
    torch.testing.assert_close(reward_model_loss(a, b), double(expected))


def test_historical_share():
    drawn = historical_sample(900, 5000, generator=torch.Generator().manual_seed(0))
    assert len(drawn) == 100 == len(set(drawn.tolist()))  # 100/(900 + 100) = 10%
    again = historical_sample(900, 5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again) and int(drawn.max()) < 5000
    assert len(historical_sample(900, 30)) == 30
    assert len(historical_sample(900, 30, fraction=0.0)) == 0
    for fraction in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\), got"):
            historical_sample(1, 1, fraction=fraction)
    for new, history in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"must not be negative, got new={new}, history={history}"):
            historical_sample(new, history)
