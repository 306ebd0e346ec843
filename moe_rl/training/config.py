"""The configuration of a training run: frozen, nested dataclasses whose defaults work on a laptop.

Two arms of a study share all settings but those of `MethodConfig` (and any others that the study file sets by arm,
which the report then lists). The types state the allowed numbers and names (`moe_rl.objectives.bounds`).
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moe_rl.objectives import Correction
from moe_rl.objectives.advantages import Scale
from moe_rl.objectives.bounds import BelowOne, Count, Decay, Fraction, NotNegative, Positive, Range, Seed, Whole
from moe_rl.objectives.kl import KLEstimator
from moe_rl.objectives.objective import Advantage, Aggregate, Anchor, RouteWeight
from moe_rl.objectives.ratios import RatioLevel
from moe_rl.policy.models import ModelConfig
from moe_rl.rollout import TaskConfig
from moe_rl.rollout.engine_config import COLDEST, EngineConfig

Replay = Literal["none", "R2", "R3", "PR2"]
Source = Literal["policy", "initial", "demonstrations"]
OF_SAMPLER = ("R3", "PR2")
"""The kinds of replay that force the routes under which responses were sampled."""
IN_GROUPS = ("group", "leave_one_out", "process", "decoupled")
"""The kinds of advantage that compare the responses of a group."""
DPO = "dpo"
"""Name of the one method that learns from pairs; the names of all others are in `moe_rl.objectives.OBJECTIVES`."""


@dataclass(frozen=True)
class MethodConfig:
    """The method of an arm: its objective, which routes are replayed, and stress on the routers.

    Every field of `moe_rl.objectives.Objective` can be set here and then replaces that of the preset; null keeps the
    preset's. docs/methods.md lists the presets' values."""

    objective: str = "grpo"
    """A name in `moe_rl.objectives.OBJECTIVES` (grpo, gspo, gspo_token, dr_grpo, dapo, ppo, sft, ...), or `dpo`."""
    replay: Replay = "none"
    """`none`: live routing. `R2`: force the routes of the training engine's old policy in forward and backward; the
    first update of a batch is unaltered by it, since these are the routes it would take. `R3`: force the routes that
    the rollout engine chose, in the scoring of the old policy too; that alters the policy which is optimised in every
    update, the first one included, as far as the two engines differ (arXiv 2512.01374, table 1). `PR2`: R3 where the
    policy itself samples, under routes that are predicted for the policy after the next updates (arXiv 2606.00395;
    `moe_rl.training.predictor`); evaluation is under natural routing."""
    predictor_learning_rate: Positive = 1e-3
    """PR2 only: learning rate of the linear maps that predict, warmed up as the policy's. The paper takes 50 to 10,000
    times the policy's, which there is 1e-6 or 2e-6."""
    keep: Fraction = 1.0
    """R2 only: the share of the (token, site) rows of each routing site that are replayed; the others route live. It is
    the share of all sampled responses, those that make no pair of `dpo` among them."""
    keep_by: Literal["margin", "random"] = "margin"
    """Which rows are kept: `margin`, those that the old policy decided by the least margin s_(k) - s_(k+1) of the
    scores that its router ranks, and that are the first to flip (of a router that first chooses groups of experts, as
    DeepSeek-V3's, only while the same groups are open: a warning says so); `random`, as many at random, a control."""
    keep_sites: tuple[Whole, ...] | None = None
    """R2 only: the routing sites that are replayed, counted from 0 in the order of the layers; the others route live.
    None: all of them."""
    noise: NotNegative = 0.0
    """Stress test: standard deviation of Gaussian noise on the router logits, for selection only, in the update
    forward only. Sampling, scoring, probing and evaluation never see it, nor do rows that are replayed."""
    source: Source | None = None
    """Whose responses are learned from: the current `policy`, the `initial` one, or the task's `demonstrations`. None
    takes the method's own (sft: demonstrations; rft and dpo: initial; all others: policy)."""
    beta: Positive = 0.1
    """DPO only: strength of the tie to the reference policy."""

    ratio: RatioLevel | None = None
    """Level of the importance ratio: of each token, its geometric mean over the sequence, that mean with token
    gradients, or its product over the sequence."""
    gate: str | None = None
    """What is made of ratio and advantage: a name in `moe_rl.objectives.GATES` (clip, mask, cap, sigmoid, ...), or a
    gate of your own: `package.module:function` or `path/to/file.py:function`."""
    clip_low: NotNegative | None = None
    """Lower clip range."""
    clip_high: NotNegative | None = None
    """Upper clip range."""
    dual_clip: Positive | None = None
    """Ceiling of the ratio where the advantage is negative; gates `clip` and `soft_dual_clip` only."""
    ratio_cap: Positive | None = None
    """Ceiling of the ratio; gates `divergence_tv` and `divergence_kl` only."""
    temperature_pos: Positive | None = None
    """Temperature for positive advantages; gate `sigmoid` only."""
    temperature_neg: Positive | None = None
    """Temperature for advantages that are not positive; gate `sigmoid` only."""
    power_pos: NotNegative | None = None
    """Power of the ratio for advantages that are not negative; gate `gamma` only."""
    decay_pos: Decay | None = None
    """Exponential decay in the ratio for advantages that are not negative; gate `gamma` only."""
    power_neg: NotNegative | None = None
    """Power of the ratio for negative advantages; gate `gamma` only."""
    decay_neg: Decay | None = None
    """Exponential decay in the ratio for negative advantages; gate `gamma` only."""
    anchor: Anchor | None = None
    """Denominator of the ratio: `old`, the training engine's old policy, or `rollout`, the rollout engine's own
    probabilities (`old` for most)."""
    corrections: tuple[Correction, ...] | None = None
    """Weights that correct for the engine that sampled, e.g. `[token_mask:0.5:5]`."""
    route_weight: RouteWeight | None = None
    """Where RSPO's router-shift weight enters: before or after the clip, or `none`."""
    route_floor: Fraction | None = None
    """The router-shift weight is never below this."""
    aggregate: Aggregate | None = None
    """How tokens become one number: `sequence_mean`, `token_mean`, `sum` or `constant`."""
    length_constant: Positive | None = None
    """Divisor of aggregate `constant`, in tokens; None takes the generation budget."""
    local_normalizer: bool | None = None
    """A token mean over each micro-batch by itself; aggregate `token_mean` only."""
    advantage: Advantage | None = None
    """`group`, `leave_one_out`, `gae` (a value model, see `value`), `one`, `accepted`; `process`: step rewards of the
    task, one advantage per token; `decoupled`: several rewards of the task, each normalised by itself (GDPO)."""
    advantage_scale: Scale | None = None
    """`std`, `none` or `batch` (see `group_advantages`)."""
    kl_coef: NotNegative | None = None
    """Coefficient of the KL term to the reference policy (0 for most)."""
    kl_estimator: KLEstimator | None = None
    """Estimator of the KL term, `k1`, `k2` or `k3`."""
    kl_importance_weighted: bool | None = None
    """Multiply the KL of a token by its ratio; with token ratios that makes the estimate unbiased off-policy."""


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of the sampling of responses."""

    prompts: Count = 32
    """Prompts per step."""
    group_size: Count = 8
    """Responses per prompt (G)."""
    temperature: Annotated[float, Range(COLDEST)] = 1.0
    """Sampling temperature; the policy that is trained is the one at this temperature. At least 0.01, vLLM's
    lowest, which is as good as greedy."""
    max_new_tokens: Count | None = None
    """Length limit of a response in tokens; None takes the task's."""
    lag: Whole = 0
    """Train on batches that the policy sampled this many steps ago (0: in the same step)."""
    rescore: bool = False
    """Under `lag`: a batch that waited is scored again by the weights with which its first update begins. Its old
    log-probabilities, and the routes that R2 replays, are then of these weights; `anchor: rollout` and corrections
    still refer to the policy that sampled. `objective: grpo_decoupled` is then AReaL's objective (arXiv 2505.24298)."""
    segment: Count | None = None
    """Partial rollouts: a response is written this many tokens at a time, and after each step of training the new
    weights go on with it, so that several versions of the weights write one response (the version of every token is
    kept). Each step begins one batch and trains on the oldest: the number of waiting batches never falls, so that one
    long response makes all later batches as old, also those of short responses (`version_age`). Old log-probabilities,
    and the routes that R2 replays, are those of the weights with which the batch's first update begins; R3 replays each
    token's route as it was when the token after it was written. None: one version writes all."""
    scoring: Literal["pass", "decoding"] = "pass"
    """Where old log-probabilities, and the routes that R2 replays, come from: a pass over the finished responses; or,
    one pass less, the decoding that wrote them. Decoding with a cache sums in another order, so that its numbers differ
    in the last digits and, near ties, rarely by an expert: fp32 and the training model itself (kind self) are needed.
    At steps that are probed the pass is made all the same, and rows of kind "engine", pair "engines", say what the two
    differ by."""
    dynamic_sampling: Whole = 0
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): groups whose rewards are all equal, and teach nothing, are
    replaced by groups of new prompts, in at most this many further samplings per batch; groups that are then left stay.
    0: none."""
    overlong_buffer: Whole = 0
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13; its L_cache): over the last so many tokens before the
    length limit the reward that advantages are made of falls linearly by 1. In tokens; 0: none."""
    max_batch: Count | None = None
    """Responses decoded together; None decodes all at once."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine that samples. Evaluation always samples from the training model, so that arms are compared alike."""


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the updates of weights."""

    steps: Count = 31
    """RL steps; each samples one batch and makes `num_minibatches` updates on it."""
    num_minibatches: Count = 4
    """Updates per batch (GSPO paper, section 5.1: four)."""
    micro_batch: Count | None = None
    """Responses per forward, with or without backward; None takes the whole minibatch, and 256 where a batch is scored.
    Responses of like length share a forward, which then has little padding; with `share_prompts` those of one prompt
    do. The same gradient up to rounding (those of 16 bits add up in 16 bits), but for what is defined on a forward: the
    balancing loss (`aux_loss_coef`), bnpo's local mean, and selection noise (`method.noise`), drawn for each: another
    run."""
    share_prompts: bool = False
    """Responses to one prompt share it in updates, and in the scoring of steps that no probe follows (but not where a
    batch is scored again): a forward of P + G (R - 1) tokens instead of G (P + R) with padding
    (`moe_rl.measure.shared_prompts`). The same gradient up to rounding; a sequence's last token has no route then,
    which counts of slots and loads leave out. For models whose layers are attention alone, which is tried out when a
    run starts."""
    learning_rate: Positive = 1e-3
    warmup_updates: Whole = 20
    """Linear learning-rate warm-up, in updates."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    master_weights: bool = True
    """Keep fp32 copies of trained weights of 16 bits for the updates (12 instead of 4 bytes of optimizer state each).
    Without, an update below 1/512 of a bf16 weight is lost, which at a learning rate of 1e-6 is nearly all of them."""
    weight_format: Literal["fp8", "int4", "mxfp4"] | None = None
    """Train through rounded weights (quantisation-aware training): the policy's linear layers and experts are held in
    this format, as `rollout.engine.weight_format` has it, in sampling, scoring, updates, evaluation and checkpoints;
    their gradient goes to fp32 master weights, which are rounded anew after each update. The policy of the beginning (a
    KL or DPO reference, `method.source: initial`) is the rounded one; value and reward models are not rounded. With
    `model.lora` the adapters alone are trained, over rounded weights. None: not rounded."""
    router_lr_multiplier: Positive = 1.0
    """Learning rate of the routers' own parameters over that of the rest."""
    freeze_router: bool = False
    """Keep the routers' own parameters fixed (routes still move with the hidden states)."""
    aux_loss_coef: NotNegative = 0.0
    """Coefficient of the load-balancing loss. Off by default: it is a confounder of stability studies."""
    expert_bias_rate: NotNegative = 0.0
    """Balancing without a loss (arXiv 2408.15664, algorithm 1; DeepSeek-V3): after each update the selection bias of an
    expert moves by this much, up where it had fewer than the even number of the minibatch's tokens, down where more. In
    units of what the router ranks (probabilities for Qwen3-MoE, OLMoE and Mixtral). The bias acts on the choice alone,
    in sampling, scoring, updates and evaluation alike. 0: no bias."""
    expert_bias_loads: Literal["used", "live"] = "used"
    """Which loads the bias follows under replay: `used`, those of the replayed experts, which the bias does not change,
    or `live`, those of the experts that the routers would have chosen. Without replay the two are the same."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At an update whose gradient, or that of the value model, is not finite: `stop` the run, or `skip` the update and
    go on. In both cases the update moves no weight and is recorded under `incidents/` (`moe_rl.training.incidents`). A
    forward whose log-probabilities are not finite always stops the run, since there is no update to leave out."""
    reference_reset_every: Whole = 0
    """Iterative GRPO: the current policy becomes the KL reference every this many steps (0: never). Batches that wait
    (`rollout.lag`) keep the log-probabilities of the reference by which they were scored."""


@dataclass(frozen=True)
class ValueConfig:
    """Settings of PPO's value model, which is used if advantages are `gae`."""

    model: Literal["separate", "head"] = "separate"
    """`separate`: a backbone as large as the policy's, begun as a copy of it. `head`: a linear map of the policy's last
    hidden states, whose gradient stops there."""
    learning_rate: Positive = 1e-3
    """Learning rate of the value model, warmed up as the policy's."""
    gamma: Fraction = 1.0
    """Discount of generalised advantage estimation."""
    lam: Fraction = 0.95
    """Trace decay (lambda) of generalised advantage estimation; 1 gives returns minus values."""
    clip: Positive | None = 0.2
    """How far a value may move from the old one in one step's updates and still count; None: no clip."""
    whiten: bool = True
    """Advantages with mean 0 and variance 1 over the batch's tokens, as PPO codes do."""


@dataclass(frozen=True)
class RewardConfig:
    """Settings of the rewards from which advantages are computed. `reward` in the metrics is always the verifier's."""

    model: Literal["verifier", "learned"] = "verifier"
    """`verifier`: the task's own rewards. `learned`: those of a model trained on the verifier's verdicts,
    retrained as the policy moves (iterative GRPO; its reference is reset by `optim.reference_reset_every`)."""
    learning_rate: Positive = 1e-3
    initial_batches: Count = 8
    """Batches of the initial policy that the reward model learns from before the first step."""
    retrain_every: Count = 10
    """Steps between retrainings."""
    epochs: Count = 8
    """Passes over the comparisons of a retraining."""
    batch_size: Count = 32
    """Comparisons per update."""
    history_fraction: BelowOne = 0.1
    """Share of older comparisons in a retraining (arXiv:2402.03300: a tenth)."""
    history_size: Count = 10_000
    """Older comparisons that are kept, a random choice if there are more."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings of the evaluation on held-out prompts, sampled at the training temperature."""

    every: Whole = 10
    """Steps between evaluations (0: never). The first and the last policy are always evaluated."""
    prompts: Count = 128
    """Held-out prompts, the same at every evaluation, in every arm and seed. Those of a file (task `jsonl`) are taken
    without repeats, in one random order; if there are fewer, from its beginning again."""


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of the measurements on a fixed subset after each update, in every arm, with and without replay."""

    every: Whole = 1
    """Steps between probed steps (0: never)."""
    sequences: Whole = 32
    """Responses of the step's batch that are probed, spread over its groups."""
    tokens_every: Whole = 10
    """Steps between steps whose per-token values and routes are written to Parquet (0: never), if they are probed: with
    `every: 4` and 10 here, every 20 steps."""
    floor: bool = True
    """Before the first update, unless `every` is 0, score the probed responses again with the same weights: once more,
    in other batch shapes, with another experts implementation, in bf16. These differences come from arithmetic
    alone: they are the noise floor, below which no change rate means anything. Costs five forwards of the subset and,
    meanwhile, a bf16 copy of the weights."""
    gradients: bool = False
    """Also compare, at the steps that `every` names and on the probed responses, the gradient of the arm's loss under
    live routing with that under the old policy's routes: cosine and norms, by layer and of the routers, and the cosine
    between two halves of the responses. Costs three forwards and backwards of the subset per update, and four
    gradients in memory. One process only."""
    decompose_every: Whole = 0
    """Steps between steps after whose updates the log-ratio of the probed responses is split into weights, routes and
    their interaction, also by routing site (0: never). Keeps a CPU copy of the weights during such a step; costs 3 + 2L
    forwards of the subset per update at L routing sites."""


@dataclass(frozen=True)
class DistributedConfig:
    """Settings of runs in more than one process: `torchrun --nproc_per_node N -m moe_rl run FILE` (docs/scaling.md)."""

    strategy: Literal["none", "ddp", "fsdp2"] = "none"
    """`none`: one process. `ddp`: a whole copy of the model on each. `fsdp2`: weights, gradients and optimizer states
    are sharded."""
    processes: Count | None = None
    """Number of processes that must have been started; None: any number, but more than one for ddp and fsdp2."""
    compute_dtype: Literal["bfloat16", "float16"] | None = None
    """fsdp2 only: the dtype in which weights are gathered and layers compute, while `model.dtype` is that of the shards
    that are updated. None: `model.dtype`."""
    router_fp32: bool = False
    """Keep the routers' weights, logits and gates in fp32 where the rest computes in 16 bits; also in one process,
    and in a rollout engine of kind hf."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run: one arm, one seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    tracker: Literal["trackio", "wandb", "tensorboard"] | None = None
    """Send the metrics to a tracker as well (an optional package each). wandb uses the network unless it is told not
    to; null sends nothing anywhere."""
    checkpoint_every: Count = 10
    """Steps between checkpoints (the last step always writes one). Each checkpoint replaces the one before."""
    keep_policy_every: Whole = 0
    """Steps between policies that are kept, from the initial one on, in `checkpoints/step_NNNNNN/` in hub format: for
    `moe-rl drift`, and for a run that starts from one (`model.path`). 0: none. Each takes the disk space of the model,
    in `model.dtype`."""
    seed: Seed = 0
    """Prompts, sampling, minibatch order and noise are drawn from it; arms with one seed share these draws, but for
    later prompts of arms with another `rollout.lag`."""
