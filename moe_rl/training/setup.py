"""Setup: builds the state of a run before its first step (models, optimizers, engine, log) from its configuration."""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_rl.measure.logprobs import causal_lm, evaluating
from moe_rl.measure.shared_prompts_check import check_shared_prompts
from moe_rl.policy.lora import frozen_reference
from moe_rl.policy.models import load_policy, seeded
from moe_rl.policy.router_precision import keep_routers_fp32
from moe_rl.policy.tiny import ModelError
from moe_rl.rollout import make_task
from moe_rl.rollout.completions import check_end
from moe_rl.rollout.continuing import in_turns
from moe_rl.runlog import RunLog
from moe_rl.training.config import OF_SAMPLER, RunConfig
from moe_rl.training.critic import Critic
from moe_rl.training.distributed import ranks_of
from moe_rl.training.launch import check_shares
from moe_rl.training.levers import ExpertBias
from moe_rl.training.method import resolve_method
from moe_rl.training.optimizer import policy_optimizer
from moe_rl.training.predictor import PredictedRoutes, RoutePredictor
from moe_rl.training.reward_model import RewardModel
from moe_rl.training.rollout_engine import build_engine, guard_of
from moe_rl.training.scorers import EngineRoutes, Margins, Reference, RouterScores, Scorer
from moe_rl.training.state import Listener, State
from moe_rl.training.trackers import check_tracker, start_tracker


def begin(
    config: RunConfig, folder: str | Path, cache_dir: str | Path | None = None, listener: Listener | None = None
) -> State:
    """Return the state of a run before its first step. Writes nothing but the folder itself.

    Args:
        config: what to run, validated.
        folder: the run folder.
        cache_dir: where cold-started models are kept and found; None: not kept.
        listener: called with every row of `metrics.jsonl`, and with the steps of a cold start.

    Raises:
        ModelError, EngineError: the configuration cannot run on this machine, or with this model.
        DistributedError: the processes are not those that the configuration asks for, or ranks disagree.
    """
    with ExitStack() as opened:
        state = _begin(config, Path(folder).expanduser(), cache_dir, listener, opened)
        opened.pop_all()  # from here on `State.close` closes the engine
    return state


def _begin(
    config: RunConfig, folder: Path, cache_dir: str | Path | None, listener: Listener | None, opened: ExitStack
) -> State:
    """Build the state as `begin`; `opened` closes the engine if an error occurs."""
    check_tracker(config.tracker)
    torch.manual_seed(config.seed)
    ranks = ranks_of(config.distributed, config.model.device, config.tracker, folder)
    check_shares(config, ranks.size)
    ranks.agree("the configuration", dataclasses.asdict(config))
    if ranks.main:
        folder.mkdir(parents=True, exist_ok=True)
    log = (RunLog if ranks.main else NoLog)(folder, listener)
    task = make_task(config.task)
    model, tokenizer = load_policy(
        seeded(config.model, config.seed),
        task,
        cache_dir,
        _cold_start_rows(listener),
        weights=ranks.loads,
        report=_policy_row(listener),
        seconds=config.task.verifier_seconds,
    )
    check_end(model, tokenizer, config.model.path)
    if config.distributed.router_fp32:
        check_forward(keep_routers_fp32(model))
    if config.optim.aux_loss_coef:
        check_aux_loss(model)
    ranks.agree_on_weights(model)
    max_new_tokens = config.rollout.max_new_tokens or task.max_new_tokens
    method = resolve_method(config, max_new_tokens)
    critic = Critic(model, config.value, config.optim, ranks) if method.advantage == "gae" else None
    learned = config.reward.model == "learned"
    reward_model = RewardModel(model, config.reward, config.optim, ranks) if learned else None
    optimizer = policy_optimizer(model, config.optim)  # may round weights, with which the run begins
    resets = bool(config.optim.reference_reset_every)
    reference = frozen_reference(model, resets) if method.needs_reference else None
    initial = frozen_reference(model) if method.source == "initial" else None
    engine = build_engine(config.rollout, model, tokenizer, ranks)
    opened.callback(engine.close)
    policy, optimizer = ranks.prepare(model, optimizer)
    predicted = config.method.replay == "PR2"
    predictor = RoutePredictor(policy, config.method.predictor_learning_rate, config.optim.betas) if predicted else None
    rate, live = config.optim.expert_bias_rate, config.optim.expert_bias_loads == "live"
    bias = ExpertBias(policy, rate, live) if rate else None  # under fsdp2 some ranks have no weights until here
    for module in (reference, initial):
        if module is not None:
            ranks.shard(module)
    for module in (policy, reference) if config.optim.share_prompts else ():
        if module is not None:
            check_shared_prompts(module)
    whole, part = ranks.unwrap_model(policy), config.optim.micro_batch
    guard = guard_of(engine, config.rollout, whole, tokenizer, task, max_new_tokens, ranks, part)
    if config.tracker and ranks.main:
        log.listener = start_tracker(ranks, config.tracker, folder, config, listener)
    state = State(
        config=config,
        folder=folder,
        ranks=ranks,
        log=log,
        task=task,
        tokenizer=tokenizer,
        method=method,
        max_new_tokens=max_new_tokens,
        policy=policy,
        optimizer=optimizer,
        engine=in_turns(engine, task, tokenizer, config.task.verifier_seconds),
        sync_guard=guard,
        reference=reference,
        initial=initial,
        critic=critic,
        reward_model=reward_model,
        expert_bias=bias,
        predictor=predictor,
    )
    state.scorers = scorers_of(state)
    return state


def scorers_of(state: State) -> tuple[Scorer, ...]:
    """Return the scorers that the configuration needs besides the old policy."""
    policy, temperature, predictor = state.policy, state.config.rollout.temperature, state.predictor
    compared = [one for one in (RouterScores() if state.method.weighs_routes else None, state.critic) if one]
    forced = state.config.method.replay in OF_SAMPLER  # updates run under the sampler's routes
    readers = compared if forced else ()
    sampler = (
        PredictedRoutes(policy, temperature, predictor, readers)
        if predictor
        else EngineRoutes(policy, temperature, readers)
    )
    asked = (
        Margins() if state.config.method.keep < 1 else None,
        sampler if state.records_routes else None,
        *(() if forced else compared),
        None if state.reference is None else Reference(state.reference, temperature),
        state.reward_model,
    )
    return tuple(scorer for scorer in asked if scorer is not None)


class NoLog(RunLog):
    """The log of ranks that do not write: it drops all rows."""

    def append(self, kind: str, step: int, **values: Any) -> None:
        pass


def check_forward(model: nn.Module) -> None:
    """Raise ModelError for a family whose blocks cannot multiply an fp32 router's gates with 16-bit hidden states."""
    try:
        _two_tokens(model)
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
        raise ModelError(
            f"distributed.router_fp32: {type(causal_lm(model)).__name__} cannot multiply fp32 gates with 16-bit hidden "
            f"states ({str(error).splitlines()[0]}); set it to false, or model.dtype to float32"
        ) from error


def check_aux_loss(model: nn.Module) -> None:
    """Raise ModelError for a family that has no load-balancing loss.

    Its forward has no option `output_router_logits`, or returns no `aux_loss` with that option."""
    family = type(causal_lm(model))
    known = "output_router_logits" in inspect.signature(family.forward).parameters
    said = _two_tokens(model, output_router_logits=True) if known else {}
    if said is not None and said.get("aux_loss") is None:
        raise ModelError(f"optim.aux_loss_coef: {family.__name__} has no load-balancing loss; set it to 0")


def _two_tokens(model: nn.Module, **asked: bool) -> dict[str, Any] | None:
    """Return the model's output on two tokens; None on a rank without its weights (rank 0 then makes this call)."""
    lm = causal_lm(model)
    if lm.device.type == "meta":
        return None
    with torch.no_grad(), evaluating(lm):
        return lm(torch.zeros(1, 2, dtype=torch.int64, device=lm.device), use_cache=False, **asked)


def _cold_start_rows(listener: Listener | None) -> Callable[[int, int, float], None] | None:
    """Return a function that passes steps of a cold start, which are no metrics of the run, to the listener as rows."""
    if listener is None:
        return None
    return lambda step, steps, loss: listener({"kind": "cold_start", "step": step, "steps": steps, "loss": loss})


def _policy_row(listener: Listener | None) -> Listener | None:
    """Return a function that passes a description of the initial policy, which `env.json` keeps, to the listener."""
    return None if listener is None else lambda values: listener({"kind": "policy", "step": 0, **values})
