"""The training loop: one for all methods, since arms differ only in `MethodConfig`.

    sample responses -> score them (old log-probabilities and routes in one pass) -> advantages
    -> for each minibatch: forward and backward, inside replay for a replay arm, and one optimizer step -> probe

The parts of a step, in other modules, take the few things that they need and return what they made. The whole `State`
is passed only to the functions here, to those of `other_methods` that replace them (to sample or to change models),
and to `setup`, `checkpoint` and `incidents`.
"""

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_rl.checks import sha256_of
from moe_rl.measure.logprobs import token_logps
from moe_rl.objectives import group_advantages
from moe_rl.rollout import Rollout, TaskError, seeded_random
from moe_rl.rollout.engine_config import check_routes
from moe_rl.rollout.task import problems_of
from moe_rl.training.batch import Batch, minibatches, totals_of
from moe_rl.training.checkpoint import drop_policies_after, keep_policy, load_checkpoint, save_checkpoint, settle
from moe_rl.training.config import RunConfig
from moe_rl.training.dpo import pairs_of
from moe_rl.training.incidents import NotFiniteError, gradient_incident, keep_incident
from moe_rl.training.levers import with_part_to_replay
from moe_rl.training.optimizer import memory_metrics
from moe_rl.training.other_methods import (
    other_advantages,
    other_responses,
    other_rewards,
    other_sampling,
    rescored,
    reset_reference,
    retrain_reward_model,
)
from moe_rl.training.probe import Probe, probed_rows
from moe_rl.training.probe_options import noise_floor_rows
from moe_rl.training.rollout_engine import engine_rows
from moe_rl.training.score import Scores, make_batch, score_rollout, verify
from moe_rl.training.setup import begin
from moe_rl.training.state import Listener, State
from moe_rl.training.token_tables import write_probe_tables
from moe_rl.training.update import arm_loss, update_policy
from moe_rl.training.validation import validate


def train(
    config: RunConfig, folder: str | Path, cache_dir: str | Path | None = None, listener: Listener | None = None
) -> None:
    """Train one arm with one seed, and write all measurements to `folder`. Resumes from the checkpoint there, if any.

    Args:
        config: what to run.
        folder: the run folder; `metrics.jsonl`, `tokens/`, `routes/`, `checkpoint/`, `checkpoints/` are written there.
        cache_dir: where cold-started models are kept and found; None: not kept.
        listener: called with every row of `metrics.jsonl`.

    Raises:
        ValueError: the configuration cannot run.
        CheckpointError: the folder's checkpoint is damaged.
        DistributedError: the processes are not those that the configuration asks for, or ranks disagree.
        TaskError: the task's own code failed; the message names step, prompt and completion.
        FloatingPointError: a log-probability is not finite, or a gradient if `optim.on_nonfinite` is stop. The message
            names step, tensor and, for a response, its prompt; `incidents/` has the tensors it came from.
    """
    validate(config)
    state = begin(config, folder, cache_dir, listener)
    try:
        resume(state)
        run(state)
    except TaskError as error:
        raise TaskError(f"step {state.step}: {error}. The same command goes on from the last checkpoint.") from error
    finally:
        state.close()


def resume(state: State) -> None:
    """Restore the state from the folder's checkpoint, if there is one, and remove later rows and kept policies.

    The run will write these again. Raises DistributedError, before any of them is removed, if ranks find different
    checkpoints."""
    ranks, log = state.ranks, state.log
    ranks.first(lambda: settle(state.folder) is not None)
    mark = load_checkpoint(state)
    seal = None if mark is None else sha256_of(state.folder / "checkpoint" / "state.json")  # lists all files' sums
    ranks.agree("the checkpoint", {"step": state.step, "state.json": seal})
    ranks.first(lambda: log.resume(mark))
    ranks.first(lambda: drop_policies_after(state.folder, state.step))


def run(state: State) -> None:
    """Run all steps that are left, under the expert bias if there is one. Raises FloatingPointError, see `train`."""
    try:
        with state.expert_bias.applied(state.policy) if state.expert_bias else nullcontext():
            steps(state)
    except NotFiniteError as error:
        kept = keep_incident(state, error)
        raise FloatingPointError(f"step {state.step}, {error}. The tensors that led to it are in {kept}.") from error


def steps(state: State) -> None:
    """Run all steps that are left, with their evaluations, probes and checkpoints."""
    config = state.config
    while state.step < config.optim.steps:
        if due(config.keep_policy_every, state.step):
            keep_policy(state)
        if state.step == 0 or due(config.eval.every, state.step):
            evaluate(state)
        started = time.perf_counter()
        reset_reference(state)
        retrained = retrain_reward_model(state, responses)
        while len(state.waiting) <= config.rollout.lag:
            state.waiting.append(collect_batch(state))
        batch = state.waiting.popleft()
        if config.rollout.rescore:
            batch = rescored(state, batch)
        probe = start_probe(state, batch)
        together = 2 if state.method.pairs else config.rollout.group_size
        order = minibatches(len(batch), config.optim.num_minibatches, together, state.generator("order"))
        for update, rows in enumerate(order, start=1):
            update_on(state, batch.rows(rows), update)
            for kind, row in probe.rows(update) if probe else ():
                state.log.append(kind, state.step, **row)
        if probe and probe.observations:
            rows = probed_rows(len(batch), config.probe.sequences)
            write_probe_tables(state.folder, state.step, state.tokenizer, probe.part, rows, probe.observations)
        state.step += 1
        seconds = time.perf_counter() - started
        memory = memory_metrics(state.trained, state.frozen, state.ranks)
        state.log.append("step", state.step - 1, seconds=seconds, **memory, **retrained)
        if state.step == config.optim.steps or state.step % config.checkpoint_every == 0:
            save_checkpoint(state)
    if due(config.keep_policy_every, state.step):
        keep_policy(state)
    evaluate(state)


def due(every: int, step: int) -> bool:
    """Return whether something that happens every `every` steps (0: never) happens at `step`."""
    return bool(every) and step % every == 0


# -- sample, score -----------------------------------------------------------------------------------------------------


def collect_batch(state: State) -> Batch:
    """Sample responses and return them as a scored batch.

    Old log-probabilities and routes come from one pass, or from decoding (`rollout.scoring`)."""
    config, method, ranks = state.config, state.method, state.ranks
    index = len(state.waiting)
    rng = seeded_random(config.seed, "prompts", state.step, index)
    more = partial(responses, state, rng)
    rollout, sampled = more(state.generator("sample", index)), dict[str, Any]()
    if config.rollout.segment is not None or config.rollout.dynamic_sampling:
        rollout, sampled = other_sampling(state, rollout, more)
    probe, step = config.probe, state.step + index
    probed = due(probe.every, step) or due(probe.decompose_every, step)  # the probe measures against a pass
    decoded = config.rollout.scoring == "decoding" and not probed
    scores = score_rollout(
        rollout,
        state.policy,
        ranks,
        temperature=config.rollout.temperature,
        batch_size=config.optim.micro_batch,
        scorers=state.scorers,
        decoded=decoded,
        shared=config.optim.share_prompts and not probed,
    )
    if decoded:
        rollout = replace(rollout, routes=None)  # they are the old policy's own, not those of another engine
    advantages, returns, metrics = advantages_of(state, rollout, scores)
    batch = make_batch(rollout, scores, advantages, replay=config.method.replay, step=state.step, returns=returns)
    if config.method.keep < 1 or config.method.keep_sites is not None:
        batch = with_part_to_replay(batch, config.method, scores.margins, state.generator("keep", index))
    if batch.rollout_routes is not None:
        for row in engine_rows(batch, scores.replayed_logps, state.sync_guard):
            state.log.append("engine", state.step, **row)
    two = method.source == "policy" and not decoded  # sampler and scorer are two, so that there is a gap
    about = rollout_metrics(rollout, batch, two, config.rollout.lag)
    if method.pairs:
        batch = pairs_of(batch, rollout.group_size, scores.learned_rewards)
        metrics["pairs"] = (batch.advantages > 0).sum()
    ranks.agree_on("the batch", batch.input_ids, batch.rewards, batch.advantages, batch.old_logps)
    state.log.append("rollout", state.step, **{**about, **sampled, **metrics})
    return batch


def responses(state: State, rng: Any, generator: torch.Generator, prompts: int | None = None) -> Rollout:
    """Return responses to new prompts, with the verifier's rewards, from the source that the method learns from.

    prompts: number of prompts, raised to one per rank; None: `rollout.prompts`."""
    config, source, task, guard = state.config.rollout, state.method.source, state.task, state.sync_guard
    if source == "policy" and guard and state.engine.version != state.step:
        guard.sync(state.step)
    options = dict[str, Any](group_size=config.group_size, temperature=config.temperature)
    options["record_routes"] = state.records_routes
    with state.predictor.applied(state.policy) if state.predictor else nullcontext():
        if source == "demonstrations" or config.segment is not None:
            rollout = other_responses(state, rng, options)
        else:
            rollout = state.ranks.sample(
                state.engine if source == "policy" else state.self_engine(state.initial),
                problems_of(task, rng, config.prompts if prompts is None else max(prompts, state.ranks.size)),
                max_new_tokens=state.max_new_tokens,
                generator=generator,
                **options,
            )
    if state.records_routes:
        check_routes(rollout)
    return verify(task, rollout, state.ranks, state.config.task.verifier_seconds).to(state.ranks.device)


def advantages_of(state: State, rollout: Rollout, scores: Scores) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return the method's advantages, the value model's returns (None without one), and metrics to log."""
    method, rewards, metrics = state.method, rollout.rewards, dict[str, Any]()
    if state.reward_model or state.config.rollout.overlong_buffer:
        buffer, learned = state.config.rollout.overlong_buffer, scores.learned_rewards
        rewards, metrics = other_rewards(rollout, learned, state.reward_model, buffer, state.max_new_tokens)
    if method.advantage == "group":
        return group_advantages(rewards, rollout.group_size, method.objective.advantage_scale), None, metrics
    parts = {"task": state.task, "tokenizer": state.tokenizer, "critic": state.critic, "values": scores.values}
    seconds = state.config.task.verifier_seconds
    advantages, returns, more = other_advantages(method, rewards, rollout, seconds=seconds, **parts)
    return advantages, returns, {**metrics, **more}


# -- update, probe, evaluate -------------------------------------------------------------------------------------------


def update_on(state: State, batch: Batch, update: int) -> None:
    """Make one optimizer step on one minibatch and log its row; handle a gradient that is not finite."""
    config, ranks = state.config, state.ranks
    try:
        row, gradients = update_policy(
            batch,
            state.policy,
            state.optimizer,
            ranks,
            state.method,
            config.method,
            config.optim,
            temperature=config.rollout.temperature,
            warmup=min(1.0, (state.step * config.optim.num_minibatches + update) / max(1, config.optim.warmup_updates)),
            noise=state.generator(f"noise/{ranks.rank}" if ranks.rank else "noise", update),
            learners=[one for one in (state.critic, state.predictor if update > 1 else None) if one],
            bias=state.expert_bias,
        )
    except FloatingPointError as error:  # the forward's log-probabilities are not finite: there is no gradient to skip
        raise NotFiniteError(f"update {update}", str(error), batch) from error
    if "skipped" in row:
        incident = gradient_incident(update, batch, row, gradients)
        if config.optim.on_nonfinite == "stop":
            raise incident
        keep_incident(state, incident)
    state.log.append("update", state.step, update=update, **row)


def start_probe(state: State, batch: Batch) -> Probe | None:
    """Return the step's probe, or None if none is due. Before that of the first step, log the noise floor."""
    config, step = state.config.probe, state.step
    live, decompose = due(config.every, step), due(config.decompose_every, step)
    if not (live or decompose):
        return None
    part, temperature = batch.rows(probed_rows(len(batch), config.sequences)), state.config.rollout.temperature
    if live and step == 0 and config.floor:
        whole = state.ranks.size == 1 and state.ranks.mesh is None  # shards, even on one rank, cannot be copied
        for row in noise_floor_rows(state.policy, part, temperature, bf16=whole):
            state.log.append("floor", step, **row)
    loss = partial(probe_loss, state) if config.gradients else None
    tables = state.ranks.main and due(config.tokens_every, step)
    return Probe(state.policy, part, state.ranks, temperature, live=live, decompose=decompose, loss=loss, tables=tables)


def probe_loss(state: State, part: Batch) -> Tensor:
    """Return the arm's loss on probed responses, treated as one minibatch."""
    out = token_logps(state.policy, *part.tokens, temperature=state.config.rollout.temperature, router_logits=True)
    return arm_loss(out, part, state.method, state.config.method, totals_of(part)).loss


def evaluate(state: State) -> None:
    """Log the mean reward on held-out prompts, the same every time, sampled at the training temperature."""
    count, rng = state.config.eval.prompts, random.Random("held-out")
    rollout = state.ranks.sample(
        state.self_engine(),
        problems_of(state.task, rng, count, held_out=True),
        group_size=1,
        max_new_tokens=state.max_new_tokens,
        temperature=state.config.rollout.temperature,
        generator=state.generator("evaluate"),
        record_routes=False,
    )
    rewards = verify(state.task, rollout, state.ranks, state.config.task.verifier_seconds).rewards
    state.log.append("eval", state.step, reward=rewards.mean(), reward_n=count, greedy=False)


def rollout_metrics(rollout: Rollout, batch: Batch, two: bool, lag: int) -> dict[str, Any]:
    """Return rewards, lengths and the gap between sampler and scorer of a sampled batch, to be logged.

    two: whether sampler and scorer are two, so that there is a gap."""
    rewards, size = rollout.rewards, rollout.group_size
    gap = (batch.rollout_logps - batch.live_old_logps)[batch.completion_mask].abs().mean()
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std() if len(rewards) > 1 else None,
        "reward_n": len(rollout),
        "response_length": rollout.lengths.float().mean(),
        "groups_equal": rollout.equal_groups.float().mean() if size > 1 else None,
        "rollout_logp_gap": gap if two else None,
        "lag": lag,
    }
