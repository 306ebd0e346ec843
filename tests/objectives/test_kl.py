import math

import pytest
import torch

from moe_rl.objectives import kl_estimate


def double(rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [  # d = log pi_ref - log pi = -1.5 - -1.0 = -0.5
        ("k1", 0.5, 1.0),  # -d; d(-d)/d log pi = 1
        ("k2", 0.125, 0.5),  # d^2/2; -d
        ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),  # e^d - 1 - d; 1 - e^d
    ],
)
def test_golden_values_and_slopes(estimator, value, slope):
    logps = double([[-1.0, float("nan")]], requires_grad=True)
    ref = double([[-1.5, float("inf")]], requires_grad=True)
    kl = kl_estimate(logps, ref, torch.tensor([[1, 0]]), estimator)
    torch.testing.assert_close(kl, double([[value, 0.0]]))
    kl.sum().backward()
    torch.testing.assert_close(logps.grad, double([[slope, 0.0]]))
    assert ref.grad is None


def test_expectations_over_a_known_distribution():
    # pi = (0.7, 0.3), ref = (0.4, 0.6): KL = 0.7 ln(7/4) + 0.3 ln(1/2)
    pi, ref = double([0.7, 0.3]), double([0.4, 0.6])
    exact = (pi * (pi / ref).log()).sum()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for estimator in ("k1", "k3"):
        tokens = kl_estimate(pi.log()[None], ref.log()[None], mask, estimator)[0]
        torch.testing.assert_close((pi * tokens).sum(), exact)
    # k2 is biased: E[(log pi/ref)^2]/2
    tokens = kl_estimate(pi.log()[None], ref.log()[None], mask, "k2")[0]
    torch.testing.assert_close((pi * tokens).sum(), (pi * (pi / ref).log().square()).sum() / 2)


def test_the_gradient_of_k2_is_that_of_the_kl_and_that_of_k1_vanishes():
    logits = double([0.3, -0.2, 0.9], requires_grad=True)
    ref = torch.log_softmax(double([0.0, 0.5, -0.5]), -1)
    mask = torch.ones(1, 3, dtype=torch.bool)

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    logps = torch.log_softmax(logits, -1)
    exact = gradient((logps.exp() * (logps - ref)).sum())
    for estimator, expected in (("k2", exact), ("k1", torch.zeros(3, dtype=torch.float64))):
        logps = torch.log_softmax(logits, -1)
        tokens = kl_estimate(logps[None], ref[None], mask, estimator)[0]
        torch.testing.assert_close(gradient((logps.exp().detach() * tokens).sum()), expected)


def test_k3_keeps_its_accuracy_for_close_policies():
    # e^d - 1 - d = d^2/2 + O(d^3): 5e-17 for d = 1e-8, where the naive form returns 0 or 1e-16
    kl = kl_estimate(double([[0.0]]), double([[1e-8]]), torch.tensor([[True]]), "k3")
    assert abs(kl.item()) < 1e-15
    assert kl_estimate(double([[-1.0]]), double([[-1.0]]), torch.tensor([[True]]), "k3").item() == 0.0
