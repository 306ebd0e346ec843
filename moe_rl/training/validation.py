"""Validation of configurations before anything is computed; every message names the field and the remedy."""

from moe_rl.objectives.bounds import check_settings, unknown
from moe_rl.objectives.gates import GATES
from moe_rl.objectives.presets import OBJECTIVES
from moe_rl.rollout import make_task
from moe_rl.rollout.engine_config import CONTINUING_KINDS, EngineError, check_engine
from moe_rl.training.config import DPO, IN_GROUPS, OF_SAMPLER, ProbeConfig, RunConfig
from moe_rl.training.method import Method, overrides, resolve_method


def validate(config: RunConfig) -> None:
    """Raise ValueError, naming the field and the remedy, if a configuration cannot run.

    First each setting is checked by itself (its type), then combinations of settings. A configuration object, which is
    frozen, is checked only once; `dataclasses.replace` makes a new one."""
    if getattr(config, "_validated", None) == id(config):
        return
    check_settings(config)
    rollout, optim, probe = config.rollout, config.optim, config.probe
    require(
        rollout.prompts % optim.num_minibatches == 0,
        f"optim.num_minibatches: minibatches are made of whole groups, so it must divide rollout.prompts "
        f"({rollout.prompts}), got {optim.num_minibatches}",
    )
    method = _method(config)
    _engine(config, method)
    responses = rollout.prompts * (2 if method.pairs else rollout.group_size)
    require(
        1 <= probe.sequences <= responses or not (probe.every or probe.decompose_every),
        f"probe.sequences: between 1 and the batch's {responses} responses, got {probe.sequences}"
        + (", its default" if probe.sequences == ProbeConfig().sequences else ""),
    )
    require(
        config.distributed.compute_dtype is None or config.distributed.strategy == "fsdp2",
        "distributed.compute_dtype: only fsdp2 computes in another dtype than it stores; use model.dtype",
    )
    require(
        optim.master_weights or config.model.dtype != "float16",
        "optim.master_weights: false does not go with model.dtype float16, in which the squares of small gradients "
        "are 0, and AdamW divides by them; use true, or bfloat16",
    )
    require(
        optim.weight_format is None or config.distributed.strategy in ("none", "ddp"),
        f"optim.weight_format: {optim.weight_format} rounds rows that one process holds whole, which "
        f"{config.distributed.strategy} shards; use ddp, or leave it out",
    )
    require(
        optim.weight_format is None or optim.master_weights,
        "optim.master_weights: false does not go with optim.weight_format, which rounds the master weights",
    )
    _unread(config, method)
    _reward(config, method)
    _dapo(config, method)
    _levers(config, method)
    _exclusions(config, method)
    object.__setattr__(config, "_validated", id(config))  # the id tells this object from a copy with the same attribute


def require(ok: bool, message: str) -> None:
    """Raise ValueError with this message unless `ok`."""
    if not ok:
        raise ValueError(message)


def excludes(on: object, setting: str, *others: tuple[str, object], remedy: str = "") -> None:
    """Raise ValueError if a setting is on and one of the others is not as it needs them.

    others: pairs of field with reason, and whether that field is as needed; the first that is not is named."""
    for field, ok in others if on else ():
        require(bool(ok), f"{setting} does not go with this {field}{remedy}")


def _method(config: RunConfig) -> Method:
    """Return the method of a configuration, after checks of it."""
    own, rollout = config.method, config.rollout
    names = (*sorted(OBJECTIVES), DPO)
    if own.objective not in names:
        raise ValueError(unknown("method.objective", own.objective, names))
    if own.objective == DPO:
        _dpo(config)
    method = resolve_method(config, budget=1)
    require(
        rollout.group_size >= 2 or not (method.pairs or method.advantage in IN_GROUPS),
        f"rollout.group_size: a group baseline needs 2 or more, got {rollout.group_size} ({own.objective} compares the "
        "responses of a group; ppo, sft and rft do not)",
    )
    _source(config, method)
    _supervision(config, method)
    return method


def _unread(config: RunConfig, method: Method) -> None:
    """Raise ValueError for a setting that the method does not read, since its user expects an effect."""
    own, o = config.method, method.objective
    require(
        method.pairs or own.beta == type(own)().beta,
        f"method.beta: the tie of dpo to its reference, which {own.objective} does not read, got {own.beta}; the KL "
        "term of other methods is method.kl_coef",
    )
    require(
        own.replay == "PR2" or own.predictor_learning_rate == type(own)().predictor_learning_rate,
        f"method.predictor_learning_rate: only replay PR2 has predictors, got {own.predictor_learning_rate} with "
        f"replay {own.replay!r}; leave it out",
    )
    require(
        method.needs_reference or not config.optim.reference_reset_every,
        f"optim.reference_reset_every: {own.objective} has no reference to reset; set method.kl_coef above 0",
    )
    if method.pairs:
        return
    sees_ratios = o.gate != "likelihood" or (bool(o.kl_coef) and o.kl_importance_weighted)
    read = {
        "ratio": sees_ratios,
        "anchor": sees_ratios,
        "route_weight": sees_ratios or o.route_weight != "before_clip",
        "length_constant": o.aggregate == "constant",
        "route_floor": o.route_weight != "none",
        "advantage_scale": o.advantage in ("group", "process"),
        "kl_estimator": bool(o.kl_coef),
        "kl_importance_weighted": bool(o.kl_coef),
    }
    of_gates = {knob for gate in GATES.values() for knob in gate.knobs}
    preset = OBJECTIVES[own.objective]
    for name, value in overrides(own).items():
        ignored = not read.get(name, name not in of_gates or name in GATES[o.gate].knobs)
        require(
            not ignored or value == getattr(preset, name),
            f"method.{name}: {own.objective} does not read it, got {value!r} (gate {o.gate!r}, aggregate "
            f"{o.aggregate!r}, advantage {o.advantage!r}, kl_coef {o.kl_coef:g}); leave it out",
        )


def _dpo(config: RunConfig) -> None:
    """Raise ValueError for settings that do not go with DPO."""
    own, size = config.method, config.optim.micro_batch
    for knob, value in overrides(own).items():
        raise ValueError(
            f"method.{knob}: dpo learns from pairs and has no {knob}, got {value!r}; its own knob is method.beta"
        )
    require(
        own.source != "demonstrations",
        "method.source: dpo compares responses to one prompt, and the task demonstrates one; use policy or initial",
    )
    require(size is None or size % 2 == 0, f"optim.micro_batch: dpo's pairs stay together, so even; got {size}")


def _source(config: RunConfig, method: Method) -> None:
    """Raise ValueError for settings that do not go with the source of the responses."""
    own = config.method
    if method.source == "policy":
        return
    require(
        config.rollout.lag == 0,
        f"rollout.lag: {own.objective} learns from {method.source!r} responses, which do not age; got "
        f"{config.rollout.lag}, expected 0",
    )
    require(
        "rollout_logps" not in method.objective.needs or method.source != "demonstrations",
        f"method.source: {own.objective} needs the log-probabilities of whoever sampled, and nobody sampled the "
        "demonstrations",
    )
    if method.source == "demonstrations":
        require(
            method.advantage in ("one", "accepted", "gae"),
            f"method.source: a demonstration has no group to be compared with, which advantage {method.advantage!r} "
            "wants; use method.objective='sft', or method.advantage='one'",
        )
        _task_offers(config, "demonstration", "method.source: demonstrations")


def _engine(config: RunConfig, method: Method) -> None:
    """Raise ValueError for settings of the rollout engine that cannot run, or that do not go with the method."""
    try:
        check_engine(config.rollout.engine)
    except EngineError as error:
        raise ValueError(str(error)) from error
    other = config.rollout.engine.kind != "self"
    require(
        method.source == "policy" or not (other or config.method.replay in OF_SAMPLER),
        "method.source: a rollout engine and replay R3 or PR2 need responses of the current policy, got source "
        f"{method.source!r}; use rollout.engine.kind: self, and replay none or R2",
    )


def _supervision(config: RunConfig, method: Method) -> None:
    """Raise ValueError for advantages (process, decoupled) that need rewards which the task does not offer."""
    if method.advantage == "process":
        scale = method.objective.advantage_scale
        require(
            scale != "batch",
            "method.advantage_scale: process supervision normalises in the group: std or none, not batch",
        )
        _task_offers(config, "step_rewards", "method.advantage: process")
    if method.advantage == "decoupled":
        _task_offers(config, "rewards", "method.advantage: decoupled")


def _task_offers(config: RunConfig, part: str, field: str) -> None:
    """Raise ValueError unless the task has the method `part`, which the setting `field` needs."""
    require(
        hasattr(make_task(config.task), part),
        f"{field} asks for {part}(), which task {config.task.name} lacks (see moe_rl.rollout.Task); mod_chain has it",
    )


def _reward(config: RunConfig, method: Method) -> None:
    """Raise ValueError for settings that do not go with a learned reward."""
    reward = config.reward
    if reward.model == "verifier":
        return
    refused = {
        "accepted": "a learned reward has no threshold above which a response is right",
        "one": "imitation looks at no reward",
        "process": "step rewards come from the task",
        "decoupled": "several rewards come from the task",
    }
    require(
        method.advantage not in refused,
        f"reward.model: learned, but {config.method.objective} makes its advantages by {method.advantage!r}: "
        f"{refused.get(method.advantage)}. Use verifier",
    )
    require(
        config.rollout.group_size >= 2,
        "rollout.group_size: a reward model learns from pairs within a group, so 2 or more; got "
        f"{config.rollout.group_size}",
    )
    why = "method.source: a reward model learns from pairs within a group, and a prompt has one demonstration"
    require(method.source != "demonstrations", f"{why}; use policy or initial, or reward.model: verifier")


def _levers(config: RunConfig, method: Method) -> None:
    """Raise ValueError for settings of partial replay, expert bias or router learning rate that do not go together."""
    own, optim = config.method, config.optim
    require(
        own.keep == 1 or own.replay == "R2",
        f"method.keep: only replay R2 can replay a part of the routes, got {own.keep} with replay {own.replay!r}; set "
        "method.replay: R2, or leave keep out",
    )
    require(own.keep < 1 or own.keep_by == "margin", "method.keep_by: only for method.keep below 1; leave it out")
    chosen = own.keep_sites
    require(chosen is None or own.replay == "R2", "method.keep_sites: only for replay R2; set method.replay: R2")
    require(
        chosen is None or 0 < len(chosen) == len(set(chosen)),
        f"method.keep_sites: one or more different sites, got {list(chosen or ())}; leave it out to replay all",
    )
    require(
        optim.expert_bias_loads == "used" or (optim.expert_bias_rate > 0 and own.replay != "none"),
        f"optim.expert_bias_loads: {optim.expert_bias_loads!r} has an effect only with an expert bias under replay; "
        "set optim.expert_bias_rate above 0 and method.replay to R2 or R3, or leave it at used",
    )
    fixed = "has no effect, since optim.freeze_router keeps the routers fixed; set one of the two to its default"
    require(
        optim.router_lr_multiplier == 1 or not optim.freeze_router,
        f"optim.router_lr_multiplier: {optim.router_lr_multiplier:g} {fixed}",
    )
    trains = config.model.lora and config.model.lora.train_router
    require(not (optim.freeze_router and trains), f"model.lora.train_router: {fixed}")
    if optim.expert_bias_rate:
        require(
            config.rollout.engine.kind == "self",
            f"optim.expert_bias_rate: the bias is on the policy's routers, which rollout.engine.kind "
            f"{config.rollout.engine.kind!r} does not have; use self",
        )
        require(
            optim.reference_reset_every == 0,
            "optim.expert_bias_rate: a reference has the bias that the policy began with, which is none, so that it "
            "cannot be reset to the current policy; set optim.reference_reset_every to 0",
        )
        require(
            config.model.lora is None or not (method.needs_reference or method.source == "initial"),
            "optim.expert_bias_rate: with model.lora the policy of the beginning is the trained model with its "
            "adapters off, and would route under the bias of today; leave out model.lora, or the reference "
            "(method.kl_coef 0) and source initial",
        )


def _dapo(config: RunConfig, method: Method) -> None:
    """Raise ValueError for settings that do not go with DAPO's dynamic sampling or overlong punishment."""
    rollout = config.rollout
    if rollout.dynamic_sampling:
        require(
            method.advantage in ("group", "leave_one_out") and method.source == "policy" and not method.pairs,
            "rollout.dynamic_sampling: replaces groups whose rewards are all equal, which is for advantages of the "
            f"group on the policy's own responses; got advantage {method.advantage!r}, source {method.source!r}",
        )
        require(
            config.reward.model == "verifier",
            "rollout.dynamic_sampling: looks at the verifier's rewards, got reward.model 'learned'",
        )
    if rollout.overlong_buffer:
        require(
            method.advantage in ("group", "leave_one_out", "gae"),
            f"rollout.overlong_buffer: changes the reward of a response, which advantage {method.advantage!r} does not "
            "look at; use group, leave_one_out or gae",
        )
        longest = rollout.max_new_tokens or make_task(config.task).max_new_tokens
        require(
            rollout.overlong_buffer <= longest,
            f"rollout.overlong_buffer: at most the length limit ({longest} tokens), got {rollout.overlong_buffer}",
        )


def _exclusions(config: RunConfig, method: Method) -> None:
    """Raise ValueError for a setting that is on and excludes another setting."""
    own, rollout, optim, probe = config.method, config.rollout, config.optim, config.probe
    kind, one_process = rollout.engine.kind, config.distributed.strategy == "none"
    goes_on = ("rollout.engine.kind: it cannot go on with a text; use self or hf", kind in CONTINUING_KINDS)
    whole_routes = own.keep == 1
    excludes(
        kind == "vllm",
        "rollout.engine.kind: vllm",
        ("model.lora: vLLM is given whole weights; leave it out, or use kind hf", config.model.lora is None),
        ("distributed.strategy: one process; set none", one_process),
    )
    excludes(
        probe.gradients,
        "probe.gradients",
        ("probe.every: the steps at which they are compared, 0 means never", probe.every > 0),
        ("distributed.strategy: gradients are compared in one process", one_process),
        ("probe.sequences: the responses are halved", probe.sequences > 1),
        ("method.objective: its loss is of pairs, which halving tears apart", not method.pairs),
    )
    excludes(
        own.replay == "PR2",
        "method.replay: PR2",
        ("rollout.engine.kind: the policy's own routers are predicted; use self", kind == "self"),
        ("method.noise: replay does not see it, but what routers say would be read beside it", not own.noise),
        ("optim.share_prompts: routers are read token by token of each response", not optim.share_prompts),
        ("distributed.strategy: one process trains the predictors; use none", one_process),
        ("optim.num_minibatches: it learns from a batch's second update on; use 2", optim.num_minibatches > 1),
    )
    excludes(
        rollout.scoring == "decoding",
        "rollout.scoring: decoding",
        ("rollout.engine.kind: another engine samples, whose numbers are its own", kind == "self"),
        ("method.source: the responses are not the policy's", method.source == "policy"),
        ("method.replay: R3 replays the sampler's routes already; use R2, which then are the same", own.replay != "R3"),
        ("method.replay: PR2 learns from what routers say in a pass", own.replay != "PR2"),
        ("method.keep: the part of the routes is chosen by margins, which a pass measures", whole_routes),
        ("method.objective: it weighs tokens by router scores, which a pass records", not method.weighs_routes),
        ("method.advantage: the value model reads the states of a pass", method.advantage != "gae"),
        ("rollout.segment: several versions of the weights wrote a response", rollout.segment is None),
        ("model.dtype: decoding and a pass agree closely in float32 only", config.model.dtype == "float32"),
        remedy="; use pass",
    )
    excludes(
        optim.share_prompts,
        "optim.share_prompts",
        ("method.noise: it is drawn for every token of every response", not own.noise),
        ("method.keep: the part of the routes is chosen by margins, of each response", whole_routes),
        ("method.objective: it weighs tokens by router scores, of each response", not method.weighs_routes),
        ("method.advantage: the value model reads the states of each response", method.advantage != "gae"),
        ("optim.expert_bias_rate: last tokens would be missing in the loads; set 0", not optim.expert_bias_rate),
        ("optim.aux_loss_coef: a load of prompts that count once is another one; set 0", not optim.aux_loss_coef),
    )
    excludes(
        rollout.segment is not None,
        "rollout.segment",
        ("rollout.lag: batches that wait already have one version each; set 0", rollout.lag == 0),
        ("rollout.dynamic_sampling: groups of other versions would fill up; set 0", not rollout.dynamic_sampling),
        ("distributed.strategy: one process writes the segments; set none", one_process),
        goes_on,
        ("reward.model: learned from responses of one version; use verifier", config.reward.model == "verifier"),
        (f"method.source: {method.source!r} responses have no versions; use policy", method.source == "policy"),
        ("method.objective: pairs (dpo) are of one version", not method.pairs),
    )
    require(
        rollout.segment is None or own.replay == "none" or method.objective.anchor == "old",
        "method.replay: under rollout.segment the tokens that one version wrote were scored with its own routes over "
        "the whole text before them, and the next version's with others; no one set of routes gives the sampler's "
        "log-probabilities back, so that a ratio anchored at the rollout is not defined under replay. Use anchor old",
    )
    excludes(
        rollout.rescore,
        "rollout.rescore",
        ("rollout.lag of 0: nothing waits, and its first update begins with the weights that scored it", rollout.lag),
        ("method.replay: R3 and PR2 replay the sampler's routes; use none or R2", own.replay in ("none", "R2")),
        ("method.keep: the part of the routes is chosen by margins when a batch is sampled; use 1", whole_routes),
        ("method.objective: pairs (dpo) have no ratio", not method.pairs),
    )
    excludes(
        hasattr(make_task(config.task), "reply"),
        f"task.name: {config.task.name} has several turns, which",
        ("rollout.segment: a turn is written by one version; leave it out", rollout.segment is None),
        ("distributed.strategy: one process; set none", one_process),
        goes_on,
        (
            f"method.advantage: {method.advantage!r} follows the tokens of one turn; use group or leave_one_out",
            method.advantage in ("group", "leave_one_out"),
        ),
        (f"method.source: {method.source!r} responses; use policy", method.source == "policy"),
        ("reward.model: learned from responses of one turn; use verifier", config.reward.model == "verifier"),
    )
    excludes(
        config.keep_policy_every,
        "keep_policy_every keeps hub format and",
        ("model.lora, whose weights have PEFT's names", config.model.lora is None),
        ("optim.expert_bias_rate, whose bias it has no place for", not optim.expert_bias_rate),
    )
