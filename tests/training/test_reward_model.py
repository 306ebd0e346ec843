"""The learned reward: which pairs it learns from, that it learns them, and its mix of new and old."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.objectives import dpo_coefficients, group_advantages, reward_model_loss
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import Problem, Rollout
from moe_rl.rollout.character_tasks import ModChain
from moe_rl.routing import RoutedExperts
from moe_rl.training import OptimConfig, ProbeConfig, RewardConfig, run
from moe_rl.training.batch import Batch
from moe_rl.training.dpo import best_and_worst, pair_loss, pairs_of, preferences
from moe_rl.training.loop import collect_batch, responses
from moe_rl.training.other_methods import retrain_reward_model
from moe_rl.training.ranks import Ranks
from moe_rl.training.reward_model import Comparisons, RewardModel, ranked_pairs

TINY = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, num_experts=4, moe_intermediate_size=8)

LEARNED = replace(
    MICRO,
    reward=RewardConfig(model="learned", initial_batches=1, retrain_every=1, batch_size=4),
    probe=ProbeConfig(every=0),
)


def reward_model(**config):
    policy = build_tiny(TINY, char_tokenizer(ModChain().alphabet))
    return RewardModel(policy, RewardConfig(**config), OptimConfig(), Ranks(device="cpu"))


def rollout(generator, groups=16, group_size=4, length=6):
    """Random tokens; a response is right if its last one is 5, and half of them end so."""
    rows = groups * group_size
    ids = torch.randint(1, 16, (rows, length), generator=generator)
    ids[:, -1] = torch.where(torch.arange(rows) % 2 == 0, 5, 7)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Rollout(
        input_ids=ids,
        attention_mask=mask,
        completion_mask=mask,
        logps=torch.zeros(rows, length),
        rewards=(ids[:, -1] == 5).float(),
        finished=mask[:, 0],
        group_size=group_size,
        problems=[Problem("^", "")] * rows,
        completions=[""] * rows,
    )


def test_it_learns_the_verifiers_order_and_keeps_a_tenth_of_history():
    generator = torch.Generator().manual_seed(0)
    model = reward_model(learning_rate=1e-2, epochs=8, batch_size=16)
    first, fresh = rollout(generator), rollout(generator)
    model.observe(first)
    assert len(model.fresh) == 32, "two right ones and two wrong ones in each of 16 groups"
    metrics = model.retrain(generator)
    assert (metrics["new"], metrics["old"]) == (32, 0) and len(model.history) == 32 and not len(model.fresh)
    assert metrics["loss"] < 0.3
    scores = model.scores(fresh.input_ids, fresh.attention_mask).detach()
    assert model.agreement(fresh.rewards, scores, 4) > 0.95, "on responses that it has not seen"
    model.observe(fresh)
    metrics = model.retrain(generator)
    assert (metrics["new"], metrics["old"]) == (32, 4), "32 / 0.9 * 0.1 = 3.6"


def test_its_loss_is_the_mean_over_pairs(monkeypatch):
    """Of the last epoch, each pair once: 32 pairs in batches of 20 and 12 do not count as two halves."""
    model = reward_model(epochs=2, batch_size=20)
    model.observe(rollout(torch.Generator().manual_seed(0)))
    monkeypatch.setattr(model, "_update", lambda pairs: float(len(pairs)))  # as if a pair's loss were that
    assert model.retrain(torch.Generator())["loss"] == (20 * 20 + 12 * 12) / 32


def test_a_gradient_that_is_not_finite_is_left_out(monkeypatch):
    """Of 4 minibatches the first, and none of a retraining without such."""
    model, factors = reward_model(epochs=1, batch_size=8), iter([float("inf")])
    monkeypatch.setattr(
        "moe_rl.training.reward_model.reward_model_loss",
        lambda better, worse: reward_model_loss(better, worse) * next(factors, 1.0),
    )
    before = model.model.head.weight.clone()
    for skipped in (1, 0):
        model.observe(rollout(torch.Generator().manual_seed(0)))
        metrics = model.retrain(torch.Generator())
        assert metrics["skipped"] == skipped
    assert all(p.isfinite().all() for p in model.model.parameters())
    assert not torch.equal(model.model.head.weight, before), "the other three are learned from"


def test_its_score_is_that_of_the_last_token_whatever_follows():
    model = reward_model()
    torch.nn.init.normal_(model.model.head.weight)
    ids = torch.tensor([[3, 4, 5, 6]])
    mask = torch.tensor([[True, True, True, True]])
    padded = torch.tensor([[9, 3, 4, 5, 6, 8, 8]])
    around = torch.tensor([[False, True, True, True, True, False, False]])
    torch.testing.assert_close(model.scores(ids, mask), model.scores(padded, around))
    assert model.scores(ids[:, :3], mask[:, :3]) != model.scores(ids, mask)


def test_without_comparisons_nothing_is_learned():
    model = reward_model()
    even = rollout(torch.Generator().manual_seed(0))
    model.observe(replace(even, rewards=torch.ones_like(even.rewards)))
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    assert model.retrain(torch.Generator()) == {"loss": None, "new": 0, "old": 0, "skipped": 0}
    assert all(torch.equal(v, before[k]) for k, v in model.model.state_dict().items())


def test_history_is_bounded_and_survives_a_checkpoint():
    generator = torch.Generator().manual_seed(0)
    model = reward_model(history_size=5, epochs=1)
    model.observe(rollout(generator))
    seen = model.fresh.input_ids.tolist()
    model.retrain(generator)
    places = [seen.index(pair) for pair in model.history.input_ids.tolist()]
    assert places == sorted(set(places)) != [0, 1, 2, 3, 4], "drawn from all, not the first"
    model.observe(rollout(generator, groups=1, length=9))
    other = reward_model()
    other.restore(model.tensors())
    assert len(other.history) == 5 and len(other.fresh) == 2
    assert torch.equal(other.fresh.input_ids, model.fresh.input_ids)


def test_a_learned_reward_makes_the_advantages_and_hears_the_verifier(state_of, tmp_path):
    state = state_of(LEARNED, tmp_path)
    assert retrain_reward_model(state, responses)["reward_model_new"] > 0
    batch, model = collect_batch(state), state.reward_model
    learned = model.scores(batch.input_ids, batch.attention_mask).detach()
    torch.testing.assert_close(batch.advantages, group_advantages(learned, 4), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(batch.advantages, group_advantages(batch.rewards, 4), atol=0.1)
    assert len(model.fresh) == len(ranked_pairs(batch.rewards, 4)) > 0
    (row,) = rows(tmp_path, "rollout")
    lengths = batch.completion_mask.sum(1).float()
    assert [row["reward"], row["reward_std"], row["response_length"]] == pytest.approx(
        [float(x) for x in (batch.rewards.mean(), batch.rewards.std(), lengths.mean())]
    )
    assert row["learned_reward"] == pytest.approx(float(learned.mean()), rel=1e-4)
    assert row["learned_reward_agreement"] == model.agreement(batch.rewards, learned, 4)


def test_a_reward_model_is_retrained_when_it_is_due_on_all_that_was_sampled_since(state_of, tmp_path):
    reward = replace(LEARNED.reward, retrain_every=2, epochs=1)
    state, heard = state_of(replace(LEARNED, reward=reward, optim=replace(MICRO.optim, steps=3)), tmp_path), []
    observe = state.reward_model.observe
    state.reward_model.observe = lambda rollout: (heard.append(len(ranked_pairs(rollout.rewards, 4))), observe(rollout))
    run(state)
    steps = [row.get("reward_model_new") for row in rows(tmp_path, "step")]
    assert steps == [heard[0], None, heard[1] + heard[2]] and len(heard) == 1 + 3, "one batch before the first step"


def test_comparisons_of_different_widths_join():
    a = Comparisons(torch.ones(1, 2, 2).long(), torch.ones(1, 2, 2).bool())
    b = Comparisons(torch.full((1, 2, 3), 2), torch.ones(1, 2, 3).bool())
    both = a + b
    assert (
        both.input_ids[0].tolist() == [[1, 1, 0]] * 2 and both.attention_mask[0].tolist() == [[True, True, False]] * 2
    )
    assert both.input_ids[1].tolist() == [[2, 2, 2]] * 2


def test_a_pair_that_the_model_scores_alike_is_in_no_order():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.2])  # the best with the worst, the second with the third
    model = reward_model()
    assert model.agreement(rewards, torch.tensor([2.0, 1.0, 1.0, 1.0]), 4) == 0.5
    assert model.agreement(torch.ones(4), rewards, 4) is None


def test_pairs():
    """Group 0: 3 > 1 > 0.5 > 0: 3 with 0, 1 with 0.5. Group 1: 1 with 0 once, 0 with 0 never."""
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.5, 0.0, 0.0, 1.0, 0.0])
    assert ranked_pairs(rewards, 4).tolist() == [[2, 1], [0, 3], [6, 7]]
    assert best_and_worst(rewards, 4).tolist() == [2, 1, 6, 4]
    assert preferences(torch.tensor([3.0, 0.0, 1.0, 1.0])).tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dpo_weighs_every_token_by_its_coefficient(beta):
    """d loss / d log pi = -+beta sigma(beta (worse - better)) / pairs, 0 in a pair without a preference."""
    mask = torch.tensor([[False, True, True], [False, True, False]] * 2)
    part = Batch(
        input_ids=torch.ones(4, 3).long(),
        attention_mask=mask,
        completion_mask=mask,
        rewards=torch.zeros(4),
        advantages=torch.tensor([1.0, -1.0, 0.0, 0.0]),
        old_logps=torch.zeros(4, 3),
        routes=RoutedExperts(torch.zeros(4, 3, 1, 1).long(), ["gate"], 2),
        rollout_logps=torch.zeros(4, 3),
        ref_logps=torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 9.0]] * 2),
        step=0,
    )
    logps = torch.tensor([[0.0, -1.5, -1.0], [0.0, -1.5, 7.0]] * 2, requires_grad=True)
    out = pair_loss(beta, logps, part, 1)
    out.loss.backward()
    # margins: better (-1.5 - 1.0) - (-1 - 2) = 0.5, worse -1.5 + 0.5 = -1
    weight = beta * float(dpo_coefficients(torch.tensor([0.5]), torch.tensor([-1.0]), beta))
    expected = torch.tensor([[0.0, -weight, -weight], [0.0, weight, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(logps.grad, expected)
    assert out.sequence_log_ratio[:2].tolist() == [-1.25, -1.5] and not out.clipped.any()


def test_a_learned_reward_chooses_the_pairs_where_there_is_one(state_of, tmp_path):
    batch = collect_batch(state_of(replace(MICRO, probe=ProbeConfig(every=0)), tmp_path))
    pairs = pairs_of(batch, 4, torch.arange(16.0))  # the last of each group is the best, the first the worst
    assert torch.equal(pairs.input_ids, batch.input_ids[[3, 0, 7, 4, 11, 8, 15, 12]])
    assert pairs.advantages.tolist() == [1.0, -1.0] * 4
