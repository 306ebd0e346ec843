"""The loop. One for all methods: only `MethodConfig` tells arms apart.

sample -> score (old log-probabilities and routes in one pass) -> advantages
       -> for each minibatch: forward and backward, inside replay for a replay arm -> step -> probe
"""

import copy
import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from moe_rl.models import load_policy
from moe_rl.objectives import OBJECTIVES, Objective, group_advantages, policy_loss
from moe_rl.rollout import Rollout, make_task, sample, score
from moe_rl.routing import change_counts, noisy_routes, record_routes, replay_routes, routing_sites
from moe_rl.training.batch import Batch, minibatches
from moe_rl.training.checkpoint import load_checkpoint, save_checkpoint
from moe_rl.training.config import MethodConfig, RunConfig, validate
from moe_rl.training.decompose_probe import DecompositionProbe
from moe_rl.training.logprobs import token_logps
from moe_rl.training.probe import Probe, ratio_facts
from moe_rl.training.runlog import RunLog

SCORING_BATCH = 256  # responses per no-grad scoring pass


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
    """
    validate(config)
    trainer = Trainer(config, folder, cache_dir, listener)
    trainer.resume()
    trainer.run()


class Trainer:
    """State of one run: policy, optimizer, reference, the queue of batches that wait under rollout lag."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        cache_dir: Path | None = None,
        listener: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.config, self.folder = config, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = RunLog(folder, listener)
        torch.manual_seed(config.seed)
        self.accelerator = Accelerator()
        self.task = make_task(config.task)
        model, self.tokenizer = load_policy(config.model, self.task, cache_dir=cache_dir)
        self.objective = resolve_objective(config.method)
        self.reference = copy.deepcopy(model).eval() if self.objective.kl_coef else None
        groups = parameter_groups(model, config)
        fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
        optimizer = torch.optim.AdamW(
            groups, betas=config.optim.betas, weight_decay=config.optim.weight_decay, fused=fused
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if self.reference is not None:
            self.reference.to(self.accelerator.device)
        self.queue: deque[Batch] = deque()
        self.step = 0

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the current step to the last."""
        config = self.config
        while self.step < config.optim.steps:
            if self.step == 0 or (config.eval.every and self.step % config.eval.every == 0):
                self.evaluate()
            started = time.perf_counter()
            while len(self.queue) <= config.rollout.lag:
                self.queue.append(self.collect())
            batch = self.queue.popleft()
            self.reset_reference()
            probing = config.probe.every and self.step % config.probe.every == 0
            probe = Probe(self, batch) if probing else None
            splitting = config.probe.decompose_every and self.step % config.probe.decompose_every == 0
            decomposition = DecompositionProbe(self, batch) if splitting else None
            order = minibatches(batch, config.optim.num_minibatches, config.rollout.group_size, self.draw("order"))
            for update, rows in enumerate(order, start=1):
                self.update(batch.rows(rows), update)
                if probe:
                    probe(update)
                if decomposition:
                    decomposition(update)
            if probe:
                probe.finish()
            self.step += 1
            self.log.append("step", self.step - 1, seconds=time.perf_counter() - started)
            if self.step == config.optim.steps or self.step % config.checkpoint_every == 0:
                save_checkpoint(self)
        self.evaluate()

    def collect(self) -> Batch:
        """Sample a batch from the current policy and score it: old log-probabilities and routes in one pass."""
        config = self.config.rollout
        rng = random.Random(f"{self.config.seed}/prompts/{self.step}/{len(self.queue)}")
        problems = [self.task.problem(rng) for _ in range(config.prompts)]
        rollout = self.sample(problems, config.group_size, self.draw("sample", len(self.queue)))
        batch = self.score(rollout)
        mask = batch.completion_mask
        lengths = mask.sum(1).float()
        equal = batch.rewards.view(-1, config.group_size).std(1) == 0
        self.log.append(
            "rollout",
            self.step,
            reward=batch.rewards.mean(),
            reward_std=batch.rewards.std(),
            reward_n=len(batch),
            response_length=lengths.mean(),
            groups_equal=equal.float().mean(),
            rollout_logp_gap=(batch.rollout_logps - batch.old_logps)[mask].abs().mean(),
            lag=config.lag,
        )
        return batch

    def update(self, batch: Batch, update: int) -> None:
        """One optimizer step on one minibatch; forward and backward under the arm's routing."""
        optim, method = self.config.optim, self.config.method
        rate = self.learning_rate(update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]
        self.model.train()
        size = optim.micro_batch or len(batch)
        mask = batch.completion_mask
        tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
        noise = self.draw("noise", update)
        parts: list[tuple[Any, Any, Tensor]] = []
        loss_sum = aux_sum = 0.0
        counts = []
        for start in range(0, len(batch), size):
            micro = batch.rows(torch.arange(start, min(start + size, len(batch))))
            with update_routing(self.model, method, micro, noise) as routing:
                out = self.logps(self.model, micro, entropy=True, aux_loss=bool(optim.aux_loss_coef))
                loss = policy_loss(
                    self.objective,
                    out.logps,
                    micro.old_logps,
                    micro.advantages,
                    micro.completion_mask,
                    ref_logps=micro.ref_logps,
                    total_tokens=tokens,
                    total_sequences=sequences,
                )
                total = loss.loss
                if optim.aux_loss_coef:
                    share = len(micro) / len(batch)
                    total = total + optim.aux_loss_coef * share * out.aux_loss
                    aux_sum += share * float(out.aux_loss.detach())
                self.accelerator.backward(total)
            loss_sum += float(loss.loss.detach())
            counts.append(routing)
            parts.append((loss, out, micro.completion_mask))
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not torch.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {self.step}, update {update}: the gradient norm is {float(grad_norm)}. The weights are no longer "
                f"usable; the last checkpoint in {self.folder} is from before. A lower optim.learning_rate, a longer "
                "optim.warmup_updates or a tighter clip range usually helps."
            )
        self.log.append(
            "update",
            self.step,
            update=update,
            loss=loss_sum,
            lr=rate,
            grad_norm=grad_norm,
            **ratio_facts(
                log_ratio=torch.cat([loss.log_ratio.detach() for loss, _, _ in parts]),
                sequence_log_ratio=torch.cat([loss.sequence_log_ratio.detach() for loss, _, _ in parts]),
                clipped=torch.cat([loss.clipped for loss, _, _ in parts]),
                mask=mask,
            ),
            entropy=torch.cat([out.entropy.detach() for _, out, _ in parts])[mask].mean(),
            aux_loss=aux_sum if optim.aux_loss_coef else None,
            aux_loss_coef=optim.aux_loss_coef,
            **{
                name: sum(getattr(count, name) for count in counts)
                for name in ("replayed_rows", "routed_rows", "slots_changed", "slots")
            },
        )

    def evaluate(self) -> None:
        """Mean reward on held-out prompts, sampled at the training temperature; the same prompts every time."""
        rng = random.Random("held-out")
        problems = [self.task.problem(rng, held_out=True) for _ in range(self.config.eval.prompts)]
        rollout = score(self.task, self.sample(problems, 1, self.draw("evaluate")))
        self.log.append("eval", self.step, reward=rollout.rewards.mean(), reward_n=len(problems), greedy=False)

    # -- pieces ------------------------------------------------------------------------------------------------

    def sample(self, problems: list[Any], group_size: int, generator: torch.Generator) -> Rollout:
        config = self.config.rollout
        return sample(
            self.accelerator.unwrap_model(self.model),
            self.tokenizer,
            problems,
            group_size=group_size,
            max_new_tokens=config.max_new_tokens or self.task.max_new_tokens,
            temperature=config.temperature,
            generator=generator,
            max_batch=config.max_batch,
        )

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Batch:
        """What the training engine's old policy says of the responses, and which experts it chose, in one pass."""
        config, device = self.config, self.accelerator.device
        rollout = score(self.task, rollout).to(device)
        self.model.eval()
        logps, routes, ref_logps = [], [], []
        for rows in torch.arange(len(rollout.rewards)).split(SCORING_BATCH):
            part = rollout.rows(rows)
            with record_routes(self.model) as recording:
                logps.append(self.logps(self.model, part).logps)
            routes.append(recording.routes)
            if self.reference is not None:
                ref_logps.append(self.logps(self.reference, part).logps)
        return Batch(
            input_ids=rollout.input_ids,
            attention_mask=rollout.attention_mask,
            completion_mask=rollout.completion_mask,
            rewards=rollout.rewards,
            advantages=group_advantages(
                rollout.rewards, config.rollout.group_size, scale=self.objective.advantage_scale
            ),
            old_logps=torch.cat(logps),
            routes=type(routes[0]).cat(routes),
            rollout_logps=rollout.logps,
            ref_logps=torch.cat(ref_logps) if ref_logps else None,
            step=self.step,
        )

    def logps(self, model: torch.nn.Module, part: Batch | Rollout, **options: Any) -> Any:
        return token_logps(
            model,
            part.input_ids,
            part.attention_mask,
            part.completion_mask,
            temperature=self.config.rollout.temperature,
            **options,
        )

    def learning_rate(self, update: int) -> float:
        optim = self.config.optim
        done = self.step * optim.num_minibatches + update
        return optim.learning_rate * min(1.0, done / max(1, optim.warmup_updates))

    def reset_reference(self) -> None:
        every = self.config.optim.reference_reset_every
        if self.reference is not None and every and self.step and self.step % every == 0:
            self.reference.load_state_dict(self.accelerator.unwrap_model(self.model).state_dict())

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


def resolve_objective(method: MethodConfig) -> Objective:
    """The preset with the arm's own knobs."""
    knobs = ("clip_low", "clip_high", "kl_coef", "advantage_scale")
    own = {name: getattr(method, name) for name in knobs if getattr(method, name) is not None}
    return replace(OBJECTIVES[method.objective], **own)


def parameter_groups(model: torch.nn.Module, config: RunConfig) -> list[dict[str, Any]]:
    """Routers' own parameters apart from the rest, each with its learning-rate multiplier."""
    routers = {id(p) for site in routing_sites(model) for p in site.module.parameters(recurse=True)}
    own = [p for p in model.parameters() if id(p) in routers]
    rest = [p for p in model.parameters() if id(p) not in routers]
    if config.optim.freeze_router:
        for parameter in own:
            parameter.requires_grad_(False)
        own = []
    groups = [
        {"params": [p for p in rest if p.requires_grad], "multiplier": 1.0},
        {"params": [p for p in own if p.requires_grad], "multiplier": config.optim.router_lr_multiplier},
    ]
    return [{**group, "lr": config.optim.learning_rate} for group in groups if group["params"]]


class RoutingCount:
    """(token, site) rows of one update forward, how many of them by replay; response slots that were routed
    otherwise than by the old policy (0 under replay; under selection noise, the dose)."""

    replayed_rows = 0
    routed_rows = 0
    slots_changed = 0
    slots = 0


@contextmanager
def update_routing(
    model: torch.nn.Module, method: MethodConfig, batch: Batch, noise: torch.Generator
) -> Iterator[RoutingCount]:
    """The arm's routing for forward and backward: live, noisy, or the old policy's."""
    count = RoutingCount()
    with ExitStack() as stack:
        if method.noise:
            stack.enter_context(noisy_routes(model, method.noise, generator=noise))
        replay = stack.enter_context(replay_routes(model, batch.routes)) if method.replay == "R2" else None
        recording = stack.enter_context(record_routes(model))
        yield count
    changed = change_counts(batch.routes, recording.routes, batch.completion_mask)
    count.slots_changed, count.slots = changed.slots_changed, changed.slots_total
    B, T, L, _ = batch.routes.shape
    count.routed_rows = B * T * L
    if replay is not None:
        count.replayed_rows = replay.replayed_rows
        if count.replayed_rows != count.routed_rows:
            raise RuntimeError(
                f"replay forced {count.replayed_rows} of {count.routed_rows} (token, site) rows: the update forward "
                "did not run wholly under replay"
            )
