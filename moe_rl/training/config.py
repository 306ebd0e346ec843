"""What a training run is made of. Frozen, nested, every field with a default that works on a laptop.

Two arms of a study share all of this but `MethodConfig` (and what the study file says otherwise, which the
report then lists).
"""

from dataclasses import dataclass, field

from moe_rl.models import ModelConfig
from moe_rl.objectives import OBJECTIVES
from moe_rl.rollout import TaskConfig

REPLAY_KINDS = ("none", "R2")


@dataclass(frozen=True)
class MethodConfig:
    """What is compared: the objective, what is replayed, and the stress applied."""

    objective: str = "grpo"
    """A name in `moe_rl.objectives.OBJECTIVES` (grpo, gspo, gspo_token, dr_grpo, dapo, ...)."""
    replay: str = "none"
    """`none`: live routing. `R2`: force the routes of the training engine's old policy in forward and backward."""
    noise: float = 0.0
    """Stress test: standard deviation of Gaussian noise on the router logits, for selection only, in the update
    forward only. Sampling, scoring, probing and evaluation never see it; a replay arm ignores it."""
    clip_low: float | None = None
    """Lower clip range; None takes the preset's."""
    clip_high: float | None = None
    """Upper clip range; None takes the preset's."""
    kl_coef: float | None = None
    """Coefficient of the KL term to the reference policy; None takes the preset's (0 for most)."""
    advantage_scale: str | None = None
    """`std`, `none` or `batch` (see `group_advantages`); None takes the preset's."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled."""

    prompts: int = 32
    """Prompts per step."""
    group_size: int = 8
    """Responses per prompt (G)."""
    temperature: float = 1.0
    """Sampling temperature; the policy that is trained is the one at this temperature."""
    max_new_tokens: int | None = None
    """Length limit of a response in tokens; None takes the task's."""
    lag: int = 0
    """Train on batches that the policy sampled this many steps ago (0: on its own)."""
    max_batch: int | None = None
    """Responses decoded together; None decodes all at once."""


@dataclass(frozen=True)
class OptimConfig:
    """How weights are updated."""

    steps: int = 31
    """RL steps; each samples one batch and makes `num_minibatches` updates on it."""
    num_minibatches: int = 4
    """Updates per batch (GSPO paper, section 5.1: four)."""
    micro_batch: int | None = None
    """Responses per forward/backward; None takes the whole minibatch. Does not change the gradient."""
    learning_rate: float = 1e-3
    warmup_updates: int = 20
    """Linear learning-rate warm-up, in updates."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    router_lr_multiplier: float = 1.0
    """Learning rate of the routers' own parameters over that of the rest."""
    freeze_router: bool = False
    """Keep the routers' own parameters fixed (routes still move with the hidden states)."""
    aux_loss_coef: float = 0.0
    """Coefficient of the load-balancing loss. Off by default: it is a confounder of stability studies."""
    reference_reset_every: int = 0
    """Iterative GRPO: the current policy becomes the KL reference every this many steps (0: never)."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts, sampled at the training temperature."""

    every: int = 10
    """Steps between evaluations (0: never). The first and the last policy are always evaluated."""
    prompts: int = 128
    """Held-out prompts, the same at every evaluation, in every arm and seed."""


@dataclass(frozen=True)
class ProbeConfig:
    """What is measured on a fixed subset after each update, in every arm, with and without replay."""

    every: int = 1
    """Steps between probed steps (0: never)."""
    sequences: int = 32
    """Responses of the step's batch that are probed, spread over its groups."""
    tokens_every: int = 10
    """Steps between steps whose per-token facts and routes are written to Parquet (0: never)."""
    decompose_every: int = 0
    """Steps between steps after whose updates the log-ratio of the probed responses is split into weights, routes and
    their interaction, also by routing site (0: never). Keeps a CPU copy of the weights during such a step; costs 3 + 2L
    forwards of the subset per update at L routing sites."""


@dataclass(frozen=True)
class RunConfig:
    """One run: one arm, one seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    checkpoint_every: int = 10
    """Steps between checkpoints (the last step always writes one)."""
    seed: int = 0
    """Prompts, sampling, minibatch order and noise are drawn from it; arms with one seed share these draws."""


def validate(config: RunConfig) -> None:
    """Refuse what cannot run, before anything is computed. Raises ValueError naming the field and the remedy."""

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(message)

    method, rollout, optim, probe = config.method, config.rollout, config.optim, config.probe
    require(
        method.objective in OBJECTIVES,
        f"method.objective: unknown objective {method.objective!r}; known: {', '.join(sorted(OBJECTIVES))}",
    )
    require(
        method.replay in REPLAY_KINDS,
        f"method.replay: unknown kind {method.replay!r}; known: {', '.join(REPLAY_KINDS)}",
    )
    require(method.noise >= 0, f"method.noise: a standard deviation is not negative, got {method.noise}")
    require(rollout.prompts >= 1, f"rollout.prompts: at least 1, got {rollout.prompts}")
    require(
        rollout.group_size >= 2,
        f"rollout.group_size: a group baseline needs 2 or more, got {rollout.group_size}",
    )
    require(rollout.temperature > 0, f"rollout.temperature: must be positive, got {rollout.temperature}")
    require(rollout.lag >= 0, f"rollout.lag: not negative, got {rollout.lag}")
    require(optim.steps >= 1, f"optim.steps: at least 1, got {optim.steps}")
    require(optim.learning_rate > 0, f"optim.learning_rate: must be positive, got {optim.learning_rate}")
    require(
        optim.num_minibatches >= 1 and rollout.prompts % optim.num_minibatches == 0,
        f"optim.num_minibatches: minibatches are made of whole groups, so it must divide rollout.prompts "
        f"({rollout.prompts}), got {optim.num_minibatches}",
    )
    require(
        1 <= probe.sequences <= rollout.prompts * rollout.group_size or not (probe.every or probe.decompose_every),
        f"probe.sequences: between 1 and the batch's {rollout.prompts * rollout.group_size} responses, "
        f"got {probe.sequences}",
    )
