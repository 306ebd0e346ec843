"""The same tensors through TRL's own loss (`GRPOTrainer._compute_loss`), without a model, wherever TRL is there."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, decoupled_advantages, group_advantages, policy_loss

trl_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs `pip install '.[trl]'`")

MAX_LENGTH = 7


def trl_loss(batch, trainer_class=None, **settings):
    """TRL's loss and gradient: a trainer without a model, whose log-probabilities are given."""
    trainer_class = trainer_class or trl_trainer.GRPOTrainer
    trainer = object.__new__(trainer_class)
    logps = batch["logps"].clone().requires_grad_()
    entropy = torch.zeros_like(logps)
    defaults = {
        "args": SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.0625,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        "model": SimpleNamespace(training=False),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x),
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.27,
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"eval": defaultdict(list), "train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logps, entropy, None),
    }
    for name, value in {**defaults, **settings}.items():
        object.__setattr__(trainer, name, value)
    ids = torch.zeros(logps.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": batch["mask"].long(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logps"],
        "ref_per_token_logps": batch["ref_logps"],
        "sampling_per_token_logps": batch["rollout_logps"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    if "importance_sampling_ratio" in batch:
        inputs["importance_sampling_ratio"] = batch["importance_sampling_ratio"]
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], trainer._metrics["eval"]


def make_batch(seed, spread, token_advantages=False):
    g = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(8, MAX_LENGTH, generator=g, dtype=torch.float64) * scale

    old = -normal(1.0).abs() - 0.05
    lengths = torch.randint(1, MAX_LENGTH + 1, (8, 1), generator=g)
    return {
        "logps": old + normal(spread),
        "old_logps": old,
        "ref_logps": old + normal(0.2),
        "rollout_logps": old + normal(0.3),
        "advantages": normal(1.0) if token_advantages else normal(1.0)[:, 0],
        "mask": torch.arange(MAX_LENGTH) < lengths,
    }


def ours(objective, batch, *given):
    logps = batch["logps"].clone().requires_grad_()
    out = policy_loss(
        objective,
        logps,
        batch["old_logps"],
        batch["advantages"],
        batch["mask"],
        **{name: batch[name] for name in given},
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, logps)[0], out


GRPO, GSPO = OBJECTIVES["grpo"], OBJECTIVES["gspo"]
CASES = {
    "grpo": (GRPO, {}),
    "gspo": (GSPO, {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "dr_grpo": (
        replace(OBJECTIVES["dr_grpo"], length_constant=MAX_LENGTH),
        {"loss_type": "dr_grpo", "epsilon_high": 0.2},
    ),
    "dapo": (OBJECTIVES["dapo"], {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": (OBJECTIVES["bnpo"], {"loss_type": "bnpo"}),
    "cispo": (OBJECTIVES["cispo"], {"loss_type": "cispo", "epsilon_high": 5.0}),
    # TRL 1.16 makes the temperatures a float32 tensor, so that its 1.05 is 1.0499999523: compare at an exact number
    "sapo": (replace(OBJECTIVES["sapo"], temperature_neg=1.0625), {"loss_type": "sapo"}),
    "dual_clip": (OBJECTIVES["dual_clip"], {"delta": 3.0}),
    "luspo": (
        OBJECTIVES["luspo"],
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
    ),
}


@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, beta, token_advantages):
    objective, settings = CASES[name]
    for seed, spread in enumerate((0.5, 1e-3, 1.5)):
        batch = make_batch(seed, spread, token_advantages)
        for weighted in (False, True):
            theirs = trl_loss(batch, beta=beta, use_bias_correction_kl=weighted, **settings)
            o = replace(objective, kl_coef=beta, kl_importance_weighted=weighted)
            loss, slope, _ = ours(o, batch, *(["ref_logps"] if beta else []))
            torch.testing.assert_close(loss, theirs[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(slope, theirs[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spread", [1e-3, 0.5, 1.5])
def test_vespo_is_that_of_trl(spread):
    # in `CASES` TRL would weigh the KL by token ratios, our objective by the ratio that the gate sees
    batch = make_batch(7, spread)
    batch["advantages"] = batch["advantages"][:, None]  # as TRL's own preparation leaves them
    theirs = trl_loss(batch, loss_type="vespo")
    batch["advantages"] = batch["advantages"][:, 0]
    loss, slope, _ = ours("vespo", batch)
    torch.testing.assert_close(loss, theirs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, theirs[1], rtol=1e-10, atol=1e-12)


def test_clip_fractions_are_those_of_trl():
    # TRL counts tokens under a token ratio and sequences under a sequence ratio
    batch = make_batch(0, 0.5)
    *_, metrics = trl_loss(batch)
    *_, out = ours("grpo", batch)
    tokens = out.metrics["tokens"].item()
    assert metrics["clip_ratio/region_mean"] == [pytest.approx(out.metrics["clipped_tokens"].item() / tokens)]
    assert metrics["clip_ratio/low_mean"] == [pytest.approx(out.metrics["clipped_low_tokens"].item() / tokens)]
    assert metrics["clip_ratio/high_mean"] == [pytest.approx(out.metrics["clipped_high_tokens"].item() / tokens)]
    batch = make_batch(0, 1e-3)
    *_, metrics = trl_loss(batch, **CASES["gspo"][1])
    *_, out = ours("gspo", batch)
    assert metrics["clip_ratio/region_mean"] == [
        pytest.approx((out.metrics["clipped_sequences"] / out.metrics["sequences"]).item())
    ]


def test_off_policy_sequence_mask_is_that_of_trl():
    batch = make_batch(3, 0.5)
    theirs = trl_loss(batch, off_policy_mask_threshold=0.1)
    loss, slope, out = ours("grpo_opsm", batch, "rollout_logps")
    assert 0 < out.metrics["correction_dropped_tokens"] < out.metrics["tokens"]
    torch.testing.assert_close(loss, theirs[0])
    torch.testing.assert_close(slope, theirs[1])


@pytest.mark.parametrize(
    ("name", "sequence", "masked", "low", "high"),
    [
        ("grpo_tis", False, False, None, 2.0),
        ("grpo_mis", False, True, None, 3.0),
        ("grpo_decoupled", False, True, None, 5.0),
        ("grpo_icepop", False, True, 0.5, 5.0),
        ("grpo_seq_tis", True, False, None, 3.0),
        ("grpo_seq_mis", True, True, None, 3.0),
    ],
)
def test_engine_corrections_enter_as_in_trl(name, sequence, masked, low, high):
    # TRL computes these weights inside generation; the four lines are written down again here
    batch = make_batch(4, 0.5)
    gap = (batch["old_logps"] - batch["rollout_logps"]) * batch["mask"]
    ratio = (gap.sum(-1, keepdim=True) if sequence else gap).exp()
    batch["importance_sampling_ratio"] = (
        ratio.masked_fill((ratio < (low or 0.0)) | (ratio > high), 0.0) if masked else ratio.clamp(min=low, max=high)
    )
    theirs = trl_loss(batch, use_vllm=True, vllm_importance_sampling_correction=True)
    loss, slope, _ = ours(name, batch, "rollout_logps")
    torch.testing.assert_close(loss, theirs[0])
    torch.testing.assert_close(slope, theirs[1])


def test_gmpo_is_that_of_trl():
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    batch = make_batch(5, 0.5)
    theirs = trl_loss(batch, gmpo.GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)
    loss, slope, _ = ours("gmpo", batch)
    torch.testing.assert_close(loss, theirs[0])
    torch.testing.assert_close(slope, theirs[1])


def test_advantages_are_trls_formulas():
    # `_generate_and_score_completions` computes these inline; nanstd is its unbiased standard deviation
    g = torch.Generator().manual_seed(6)
    rewards = torch.rand(12, 2, generator=g, dtype=torch.float64)
    total, groups = rewards.sum(-1), rewards.sum(-1).reshape(3, 4)
    spread = trl_trainer.nanstd(groups, dim=1).repeat_interleave(4)
    centred = total - groups.mean(1).repeat_interleave(4)
    torch.testing.assert_close(group_advantages(total, 4), centred / (spread + 1e-4))
    torch.testing.assert_close(group_advantages(total, 4, "batch"), centred / (trl_trainer.nanstd(total) + 1e-4))
    per_reward = rewards.reshape(3, 4, 2)
    normal = (per_reward - per_reward.mean(1, keepdim=True)) / (
        trl_trainer.nanstd(per_reward, dim=1, keepdim=True) + 1e-4
    )
    summed = normal.reshape(12, 2).sum(-1)
    torch.testing.assert_close(
        decoupled_advantages(rewards, 4), (summed - summed.mean()) / (trl_trainer.nanstd(summed) + 1e-4)
    )
