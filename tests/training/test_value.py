"""PPO's value model: what it regresses, what it sees, and that the policy does not feel it."""

from dataclasses import replace

import pytest
import torch

from moe_rl.measure import token_logps
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout.character_tasks import ModChain
from moe_rl.routing import record_routes
from moe_rl.training import OptimConfig, ValueConfig
from moe_rl.training.batch import Batch, Totals, totals_of
from moe_rl.training.critic import Critic
from moe_rl.training.ranks import Ranks

TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)


@pytest.fixture(scope="module")
def policy():
    return build_tiny(TINY, char_tokenizer(ModChain().alphabet))


@pytest.fixture(scope="module")
def batch(policy):
    """Four rows: prompts of 3 behind padding of 1, completions of 4, the last row's of 2."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 16, (4, 8), generator=generator)
    attention = torch.ones(4, 8, dtype=torch.bool)
    attention[:, 0] = False
    attention[3, 6:] = False
    completion = attention.clone()
    completion[:, :4] = False
    with torch.no_grad(), record_routes(policy) as recording:
        policy(input_ids=ids, attention_mask=attention.long())
    zeros = torch.zeros(4, 8)
    return Batch(
        input_ids=ids,
        attention_mask=attention,
        completion_mask=completion,
        rewards=torch.ones(4),
        advantages=torch.zeros(4),
        old_logps=zeros,
        routes=recording.routes,
        rollout_logps=zeros,
        ref_logps=None,
        step=0,
        values=zeros,
        returns=torch.full((4, 8), 0.7),
    )


def critic_of(policy, **config):
    return Critic(policy, ValueConfig(**config), OptimConfig(), Ranks(device="cpu"))


def values_of(critic, policy, batch):
    with critic.watch(policy) as states:
        token_logps(policy, batch.input_ids, batch.attention_mask, batch.completion_mask)
    return critic.values(batch, states), states


@pytest.mark.parametrize("model", ["separate", "head"])
def test_the_value_learns_a_constant(policy, batch, model):
    critic = critic_of(policy, model=model, learning_rate={"separate": 1e-2, "head": 5e-2}[model], clip=None)
    first, states = values_of(critic, policy, batch)
    assert not first.any(), "it begins at 0"
    losses = []
    for _ in range({"separate": 60, "head": 600}[model]):
        critic.backward(batch, states, totals_of(batch))
        critic.clip()
        losses.append(critic.step(1.0)["value_loss"])
    assert losses[0] == pytest.approx(0.5 * 0.7**2)
    last = values_of(critic, policy, batch)[0].detach()
    assert last[batch.completion_mask].tolist() == pytest.approx([0.7] * 14, abs=0.05)
    assert not last[~batch.completion_mask].any()


@pytest.mark.parametrize("model", ["separate", "head"])
def test_the_value_of_a_token_sees_what_is_before_it_only(policy, batch, model):
    critic = critic_of(policy, model=model)
    weight = critic.model.head.weight if model == "separate" else critic.model.weight
    torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    before = values_of(critic, policy, batch)[0]
    ids = batch.input_ids.clone()
    ids[:, 5] = (ids[:, 5] % 14) + 1  # another second token of the completion
    after = values_of(critic, policy, replace(batch, input_ids=ids))[0]
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert bool(((before - after)[:3, 6:].abs() > 1e-3).all())


@pytest.mark.parametrize(("value", "loss", "moves"), [(0.1, 0.5 * 0.6**2, True), (0.3, 0.5 * 0.5**2, False)])
def test_a_clipped_value_loss_stops_where_the_value_has_moved_far_enough(policy, batch, value, loss, moves):
    """Returns of 0.7, old values of 0, clip 0.2. From 0.1 it goes on; 0.3 counts as 0.2, whose gradient is 0."""
    critic = critic_of(policy, model="head", clip=0.2)
    torch.nn.init.constant_(critic.model.bias, value)
    _, states = values_of(critic, policy, batch)
    critic.backward(batch, states, Totals(14, 4, 0))
    assert (float(critic.model.bias.grad.abs()) > 0.1) == moves
    critic.clip()
    assert critic.step(0.0)["value_loss"] == pytest.approx(loss)
    assert critic.model.bias.item() == pytest.approx(value), "at none of its learning rate"


def test_advantages_and_returns_of_a_value_that_knows_nothing(policy, batch):
    """V = 0, gamma = 1: the return of every token is R at lam 1; R lam^(tokens left) in general."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    critic = critic_of(policy, lam=1.0, whiten=False)
    advantages, returns, metrics = critic.advantages(rewards, batch.values, batch.completion_mask)
    assert torch.equal(advantages, batch.completion_mask * rewards[:, None])
    assert torch.equal(returns, advantages) and float(metrics["explained_variance"]) == 0.0
    mask = batch.completion_mask
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    _, returns, metrics = critic.advantages(torch.full((4,), 0.7), values, mask)
    assert 0 < float((returns[mask] - 0.7).abs().max()) < 1e-6, "the same return, but for rounding,"
    assert metrics["explained_variance"].isnan(), "of which a value explains nothing: -1e11"
    whitened = critic_of(policy, lam=1.0).advantages(rewards, batch.values, mask)[0][mask]
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-6) and float(whitened.std()) == pytest.approx(1)
    critic = critic_of(policy, lam=0.5, whiten=False)
    advantages, _, _ = critic.advantages(rewards, batch.values, batch.completion_mask)
    assert advantages[0, 4:].tolist() == [0.125, 0.25, 0.5, 1.0]
    assert advantages[3].tolist() == [0, 0, 0, 0, 0.5, 1.0, 0, 0]
    # V = .2, .4 and gamma .5: delta = .5 * .4 - .2 = 0 and 1 - .4 = .6, so that A = 0 + .5 * .9 * .6 and .6
    known = batch.values.index_put((torch.tensor([3, 3]), torch.tensor([4, 5])), torch.tensor([0.2, 0.4]))
    critic = critic_of(policy, gamma=0.5, lam=0.9, whiten=False)
    advantages, returns, _ = critic.advantages(rewards, known, mask)
    assert advantages[3, 4:6].tolist() == pytest.approx([0.27, 0.6])
    assert returns[3, 4:6].tolist() == pytest.approx([0.47, 1.0])


def test_the_value_loss_of_micro_batches_is_that_of_the_minibatch(policy, batch):
    """Of unequal numbers of tokens: four rows of 4, 4, 4 and 2."""
    gradients = []
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        critic = critic_of(policy)
        torch.nn.init.constant_(critic.model.head.weight, 0.1)
        for rows in parts:
            critic.backward(batch.rows(torch.tensor(rows)), [], totals_of(batch))
        gradients.append(critic.model.head.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert bool(gradients[0].any())


def test_the_policy_does_not_feel_the_value_head(policy, batch):
    critic = critic_of(policy, model="head")
    torch.nn.init.normal_(critic.model.weight)
    _, states = values_of(critic, policy, batch)
    critic.backward(batch, states, Totals(14, 4, 0))
    assert all(p.grad is None for p in policy.parameters())
    assert critic.model.weight.grad.abs().sum() > 0


def test_a_head_that_saw_no_states_says_what_to_do(policy, batch):
    with pytest.raises(RuntimeError, match=r"value\.model='separate'"):
        critic_of(policy, model="head").values(batch, [])
