"""The loop. One for all methods: only `MethodConfig` tells arms apart.

sample -> score (old log-probabilities and routes in one pass) -> advantages
       -> for each minibatch: forward and backward, inside replay for a replay arm -> step -> probe

What a method needs beyond that stands in files of its own: `method`, `advantages`, `value` (PPO), `reward_model`
(iterative GRPO), `router_shift` (RSPO), `preference` (DPO).
"""

import dataclasses
import hashlib
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.lora import frozen_reference
from moe_rl.models import load_policy, seeded
from moe_rl.objectives import LossOutput, policy_loss
from moe_rl.rollout import Rollout, make_task
from moe_rl.training.batch import Batch, minibatches
from moe_rl.training.checkpoint import load_checkpoint, save_checkpoint
from moe_rl.training.config import RunConfig
from moe_rl.training.decompose_probe import DecompositionProbe
from moe_rl.training.distributed import Ranks, digest
from moe_rl.training.footprint import footprint
from moe_rl.training.launch import check_shares
from moe_rl.training.logprobs import TokenLogps, token_logps
from moe_rl.training.method import resolve_method
from moe_rl.training.optimizer import policy_optimizer
from moe_rl.training.preference import pair_loss
from moe_rl.training.probe import Probe
from moe_rl.training.responses import held_out, respond
from moe_rl.training.reward_model import RewardModel, retrain_if_due
from moe_rl.training.rollouts import Rollouts, rollout_engine
from moe_rl.training.router_precision import keep_routers_fp32
from moe_rl.training.router_shift import chosen_scores, shift_weight
from moe_rl.training.runlog import NoLog, RunLog
from moe_rl.training.scoring import score_rollout
from moe_rl.training.tally import Tally
from moe_rl.training.trackers import check_tracker, start_tracker
from moe_rl.training.update_routing import update_routing
from moe_rl.training.validation import validate
from moe_rl.training.value import Critic


def train(
    config: RunConfig,
    folder: Path,
    cache_dir: Path | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train one arm with one seed; everything that is measured goes to `folder`. Resumes from its checkpoint.

    Args:
        config: what to run.
        folder: the run folder; `metrics.jsonl`, `tokens/`, `routes/` and `checkpoint/` are written there.
        cache_dir: where cold-started models are kept and found; None: not kept.
        listener: called with every row of `metrics.jsonl`.

    Raises:
        ValueError: the configuration cannot run.
        CheckpointError: the folder's checkpoint is damaged.
        DistributedError: other processes than the configuration asks for, or ranks that disagree.
    """
    validate(config)
    trainer = Trainer(config, folder, cache_dir, listener)
    try:
        trainer.resume()
        trainer.run()
    finally:
        trainer.close()


class Trainer:
    """State of one run: policy, optimizer, what else the method trains or keeps, the batches that wait under lag."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        cache_dir: Path | None = None,
        listener: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.config, self.folder = config, folder
        check_tracker(config.tracker)
        torch.manual_seed(config.seed)
        self.accelerator = Ranks(config.distributed, config.model.device, config.tracker, folder)
        check_shares(config, self.accelerator.size)
        self.accelerator.agree("the configuration", dataclasses.asdict(config))
        self.log: RunLog = NoLog()
        if self.accelerator.main:
            folder.mkdir(parents=True, exist_ok=True)
            self.log = RunLog(folder, listener)
        self.task = make_task(config.task)
        model, self.tokenizer = load_policy(
            seeded(config.model, config.seed),
            self.task,
            cache_dir,
            _cold_start_rows(listener),
            weights=self.accelerator.loads,
            report=_policy_row(listener),
        )
        if config.distributed.router_fp32:
            keep_routers_fp32(model)
        self.accelerator.agree_on_weights(model)
        self.budget = config.rollout.max_new_tokens or self.task.max_new_tokens
        self.method = resolve_method(config, self.budget)
        resets = bool(config.optim.reference_reset_every)
        self.reference = frozen_reference(model, resets) if self.method.needs_reference else None
        self.initial = frozen_reference(model) if self.method.source == "initial" else None
        self.critic = self.reward_model = None
        if self.method.advantage == "gae":
            self.critic = Critic(model, config.value, config.optim, self.accelerator)
        if config.reward.model == "learned":
            self.reward_model = RewardModel(model, config.reward, config.optim, self.accelerator)
        optimizer = policy_optimizer(model, config.optim)
        engine = rollout_engine(self, model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        for module in self.frozen.values():
            self.accelerator.shard(module)
        self.rollouts = Rollouts(self, engine)
        self.queue: deque[Batch] = deque()
        self.step = 0
        if config.tracker and self.accelerator.main:
            self.log.listener = start_tracker(self.accelerator, config.tracker, folder, config, listener)

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the current step to the last."""
        config = self.config
        while self.step < config.optim.steps:
            if self.step == 0 or (config.eval.every and self.step % config.eval.every == 0):
                self.evaluate()
            started = time.perf_counter()
            self.reset_reference()
            retrained = retrain_if_due(self)
            while len(self.queue) <= config.rollout.lag:
                self.queue.append(self.collect())
            batch = self.queue.popleft()
            probing = config.probe.every and self.step % config.probe.every == 0
            probe = Probe(self, batch) if probing else None
            splitting = config.probe.decompose_every and self.step % config.probe.decompose_every == 0
            decomposition = DecompositionProbe(self, batch) if splitting else None
            together = 2 if self.method.pairs else config.rollout.group_size
            order = minibatches(batch, config.optim.num_minibatches, together, self.draw("order"))
            for update, rows in enumerate(order, start=1):
                self.update(batch.rows(rows), update)
                if probe:
                    probe(update)
                if decomposition:
                    decomposition(update)
            if probe:
                probe.finish()
            self.step += 1
            seconds = time.perf_counter() - started
            self.log.append("step", self.step - 1, seconds=seconds, **footprint(self), **retrained)
            if self.step == config.optim.steps or self.step % config.checkpoint_every == 0:
                save_checkpoint(self)
        self.evaluate()

    def collect(self) -> Batch:
        """Sample a batch and score it: old log-probabilities and routes of the current policy in one pass."""
        rng = random.Random(f"{self.config.seed}/prompts/{self.step}/{len(self.queue)}")
        rollout = respond(self, rng, self.draw("sample", len(self.queue)))
        batch, facts = score_rollout(self, rollout)
        self.accelerator.agree("the batch", digest(batch.input_ids, batch.rewards, batch.advantages, batch.old_logps))
        rewards, mask = rollout.rewards, batch.completion_mask
        groups = rewards.view(-1, rollout.group_size)
        own = self.method.source == "policy"
        self.log.append(
            "rollout",
            self.step,
            reward=rewards.mean(),
            reward_std=rewards.std(),
            reward_n=len(rollout),
            response_length=rollout.lengths.float().mean(),
            groups_equal=(groups.std(1) == 0).float().mean() if rollout.group_size > 1 else None,
            rollout_logp_gap=(batch.rollout_logps - batch.live_old_logps)[mask].abs().mean() if own else None,
            lag=self.config.rollout.lag,
            **facts,
        )
        return batch

    def update(self, batch: Batch, update: int) -> None:
        """One optimizer step on one minibatch; forward and backward under the arm's routing, of this rank's rows."""
        optim, method, ranks = self.config.optim, self.config.method, self.accelerator
        rate = optim.learning_rate * self.warmup(update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]
        self.model.train()
        mine = ranks.mine(batch)
        size = optim.micro_batch or len(mine)
        noise = self.draw(f"noise/{ranks.rank}" if ranks.rank else "noise", update)
        tally = Tally(self, batch)
        for start in range(0, len(mine), size):
            micro = mine.rows(torch.arange(start, min(start + size, len(mine))))
            share = len(micro) / len(batch)
            with update_routing(self.model, method, micro, noise) as routing, self.watching() as states:
                out = self.logps(
                    self.model, micro, entropy=True, aux_loss=bool(optim.aux_loss_coef), router_logits=self.shifts
                )
                gamma = self.router_shift(out, micro)
                loss = self.loss(out, micro, batch, gamma)
                total = loss.loss
                if optim.aux_loss_coef:
                    total = total + optim.aux_loss_coef * share * out.aux_loss
                ranks.backward(total * ranks.size)  # which averages over ranks; these are shares of a sum
            if self.critic:
                tally.value_loss += self.critic.backward(micro, states, int(batch.completion_mask.sum()))
            tally.add(loss, out, gamma, routing, share)
        grad_norm = ranks.clip_grad_norm_(self.model.parameters(), optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        row = tally.row()
        if self.critic:
            row["value_grad_norm"] = self.critic.step(self.warmup(update))
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {self.step}, update {update}: the gradient norm is {float(grad_norm)}. The weights are no "
                f"longer usable; the last checkpoint in {self.folder} is from before. A lower optim.learning_rate, a "
                "longer optim.warmup_updates or a tighter clip range usually helps."
            )
        self.log.append("update", self.step, update=update, lr=rate, grad_norm=grad_norm, **row)

    def evaluate(self) -> None:
        """Mean reward on held-out prompts, sampled at the training temperature; the same prompts every time."""
        prompts = self.config.eval.prompts
        rollout = held_out(self, prompts, self.draw("evaluate"))
        self.log.append("eval", self.step, reward=rollout.rewards.mean(), reward_n=prompts, greedy=False)

    # -- pieces ------------------------------------------------------------------------------------------------

    def loss(self, out: TokenLogps, micro: Batch, batch: Batch, gamma: Tensor | None) -> LossOutput:
        """The method's loss on a micro-batch of `batch`."""
        if self.method.pairs:
            return pair_loss(self.config.method.beta, out.logps, micro, int((batch.advantages > 0).sum()))
        return policy_loss(
            self.method.objective,
            out.logps,
            micro.old_logps,
            micro.advantages,
            micro.completion_mask,
            ref_logps=micro.ref_logps,
            rollout_logps=micro.rollout_logps if self.method.needs_rollout_logps else None,
            route_weight=gamma,
            total_tokens=int(batch.completion_mask.sum()),
            total_sequences=int(batch.completion_mask.any(1).sum()),
        )

    @property
    def shifts(self) -> bool:
        """Whether tokens are weighed by router shift."""
        return self.method.objective.route_weight != "none"

    def router_shift(self, out: TokenLogps, micro: Batch) -> Tensor | None:
        """RSPO's weight of each token, before its floor; None for the other methods."""
        if not self.shifts:
            return None
        assert out.router_logits is not None and micro.route_scores is not None
        return shift_weight(chosen_scores(out.router_logits, micro.routes), micro.route_scores)

    def watching(self) -> AbstractContextManager[list[Tensor]]:
        """Inside, the value model sees the policy's hidden states, if there is one that reads them."""
        return self.critic.watch(self.model) if self.critic else nullcontext([])

    def logps(self, model: torch.nn.Module, part: Batch | Rollout, **options: Any) -> Any:
        return token_logps(
            model,
            part.input_ids,
            part.attention_mask,
            part.completion_mask,
            temperature=self.config.rollout.temperature,
            **options,
        )

    def warmup(self, update: int) -> float:
        """Share of the learning rate that this update has."""
        done = self.step * self.config.optim.num_minibatches + update
        return min(1.0, done / max(1, self.config.optim.warmup_updates))

    def reset_reference(self) -> None:
        """Iterative GRPO: the current policy becomes the reference."""
        every = self.config.optim.reference_reset_every
        if self.reference is not None and every and self.step and self.step % every == 0:
            self.reference.load_state_dict(self.accelerator.unwrap_model(self.model).state_dict())

    @property
    def frozen(self) -> dict[str, nn.Module]:
        """Models that are kept and not trained, by name."""
        kept = {"reference": self.reference, "initial": self.initial}
        return {name: module for name, module in kept.items() if module is not None}

    @property
    def trained(self) -> dict[str, tuple[nn.Module, Any]]:
        """Models that are trained, by name, each with its optimizer."""
        found: dict[str, tuple[nn.Module, Any]] = {"model": (self.model, self.optimizer)}
        if self.critic:
            found["value"] = (self.critic.model, self.critic.optimizer)
        if self.reward_model:
            found["reward"] = (self.reward_model.model, self.reward_model.optimizer)
        return {name: (self.accelerator.unwrap_model(m), optimizer) for name, (m, optimizer) in found.items()}

    def draw(self, purpose: str, index: int = 0) -> torch.Generator:
        """A generator for one purpose at one step. Drawn from the seed and not from the past, so that arms with
        one seed share prompts, order and noise, and a resumed run draws what the uninterrupted one would have."""
        key = f"{self.config.seed}/{purpose}/{self.step}/{index}".encode()
        digest = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        return torch.Generator().manual_seed(digest)

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if it has one."""
        if load_checkpoint(self):
            self.log.keep_until(self.step)
        else:
            self.log.keep_until(0)
        self.accelerator.agree("the checkpoint's step", self.step)

    def close(self) -> None:
        """Tell the tracker, if there is one, that the run is over."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


def _cold_start_rows(listener: Callable[[dict[str, Any]], None] | None) -> Callable[[int, int, float], None] | None:
    """Steps of a cold start as rows for the listener only: they belong to no run's metrics."""
    if listener is None:
        return None
    return lambda step, steps, loss: listener({"kind": "cold_start", "step": step, "steps": steps, "loss": loss})


def _policy_row(listener: Callable[[dict[str, Any]], None] | None) -> Callable[[dict[str, Any]], None] | None:
    """What the run starts from, as a row for the listener only: `env.json` keeps it."""
    return None if listener is None else lambda facts: listener({"kind": "policy", "step": 0, **facts})
