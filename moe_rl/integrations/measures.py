"""Measurements inside other trainers: metrics of each update and of a probe after it.

They are written to the trainer's own log and to rows of a moe_rl run folder."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from moe_rl.measure.arithmetic import joined
from moe_rl.measure.metrics import balance_metrics, change_metrics, routing_ratio_metrics, update_ratio_metrics
from moe_rl.measure.peer_metrics import engine_metrics
from moe_rl.objectives import sequence_log_ratio, token_log_ratio
from moe_rl.objectives.diagnostics import CEILING
from moe_rl.routing import ChangeCounts, RoutedExperts, RoutingError, change_counts, record_routes, replay_routes
from moe_rl.routing.router_stats import active_set_churn, expert_load
from moe_rl.run_rows import read_rows

CHANGES = ("slot_change", "site_change", "token_change")
TAKEN = "trainer/global_step"
"""Column of an update row: the number of optimizer steps taken so far, over all of the training."""
VARIANCES = ("var_token_natural", "var_token_replayed", "var_sequence_natural", "var_sequence_replayed")
LOADS = ("load_cv_mean", "load_entropy_min")
GAPS = ("k3", "gap_mean")


class Ranks:
    """Sums, maxima and gathered rows over all processes, through the trainer's accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.main = accelerator, bool(accelerator.is_main_process)

    def sums(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over processes, on the CPU."""
        return self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").cpu()

    def most(self, value: float) -> float:
        """Return the largest value over all processes."""
        values = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.gather(values).max())

    def rows(self, values: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "B2 T2"]:
        """Return the sequences of all processes, padded on the right to one length."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def counts(self, counts: ChangeCounts) -> ChangeCounts:
        """Return change counts summed over processes."""
        deviation, flips, incomplete = counts.site_deviation, counts.flips, torch.tensor([counts.incomplete_tokens])
        parts = [self.sums(x) for x in (deviation, flips, incomplete)]
        return replace(counts, site_deviation=parts[0], flips=parts[1], incomplete_tokens=int(parts[2]))


@dataclass(eq=False)
class Minibatch:
    """One forward of an update: old log-probabilities, mask and advantages of its tokens, and the results."""

    old_logps: Float[Tensor, "B T"]
    mask: Int[Tensor, "B T"]
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"]
    logps: Float[Tensor, "B T"] | None = None
    replayed_rows: int = 0
    routed_rows: int = 0
    first_change: float | None = None
    clipped_tokens: int = 0  # this and the next field: only if the trainer's clip fractions count sequences
    clipped_sequences: int = 0
    aux_loss: float | None = None  # the model's load-balancing loss, if the trainer's loss includes it
    aux_share: float = 0.0  # its contribution to the trainer's loss

    @property
    def token_advantages(self) -> Tensor:
        """Advantages `[B,T]`; those of sequences hold for all of their tokens."""
        signed = self.advantages if self.advantages.ndim == 2 else self.advantages[:, None]
        return signed.expand_as(self.mask)

    @property
    def mean_is_of_tokens(self) -> bool:
        """Whether TRL's means over this minibatch are of the tokens that count: of one column it counts every row."""
        return self.mask.shape[1] != 1 or bool(self.mask.all())

    def ceiling_tokens(self) -> Tensor:
        """Return how many tokens have A < 0 and a ratio above the usual ceiling of dual clip."""
        assert self.logps is not None
        ratio = (self.logps - self.old_logps).exp()
        return (self.mask.bool() & (self.token_advantages < 0) & (ratio > CEILING)).sum()


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """Sequences of a batch that are scored by one call of the model after each update, live and under the old routes.

    score: the trainer's own scoring of the sequences: log-probabilities `[b,C]`, and entropies or None.
    mask: true on the response tokens that are measured, `[b,C]`: the last C of the T tokens.
    logps: the old policy's log-probabilities under live routing, nats. routes: the experts that the old policy chose
    live, under R3 too: at equal weights, scoring live and replaying these routes are the same.
    """

    score: Callable[[], tuple[Tensor, Tensor | None]]
    mask: Int[Tensor, "b C"]
    logps: Float[Tensor, "b C"]
    routes: RoutedExperts

    @property
    def tokens(self) -> Tensor:
        """`[b,T]`, True on the response tokens."""
        return nn.functional.pad(self.mask, (self.routes.shape[1] - self.mask.shape[1], 0)).bool()


@torch.no_grad()
def measure(model: nn.Module, probes: Sequence[ProbeBatch], ranks: Ranks) -> tuple[ChangeCounts, dict[str, Any]]:
    """Return change counts and metrics of the kind "probe", over all probes and processes; call it in every process."""
    new, live, entropies, forced = [], [], [], []
    for probe in probes:
        with record_routes(model) as recording:
            logps, entropy = probe.score()
        new.append(recording.routes)
        live.append(logps)
        entropies.append(entropy)
        with replay_routes(model, probe.routes):
            forced.append(probe.score()[0])
    old, tokens = RoutedExperts.cat([p.routes for p in probes]), torch.cat([p.tokens for p in probes])
    routes = RoutedExperts.cat(new)
    counts = ranks.counts(change_counts(old, routes, tokens))
    mask = ranks.rows(torch.cat([p.mask for p in probes])).bool()
    old_logps = ranks.rows(torch.cat([p.logps for p in probes]))
    metrics: dict[str, Any] = change_metrics(counts)
    known = [entropy for entropy in entropies if entropy is not None]
    if len(known) == len(probes):
        metrics["entropy"] = ranks.rows(torch.cat(known))[mask].mean()
    both = {"natural": ranks.rows(torch.cat(live)), "replayed": ranks.rows(torch.cat(forced))}
    metrics |= routing_ratio_metrics(both, old_logps, mask)
    metrics |= balance_metrics(ranks.sums(expert_load(routes, tokens)))
    churn = ranks.rows(active_set_churn(old, routes, tokens).to(mask.device))
    metrics["active_set_churn"] = churn[mask.any(1)].mean()
    return counts, metrics


class Measures:
    """Collector of an update's metrics over its micro-batches; writes the trainer's log and rows of a run folder.

    log: the trainer's own lists of training metrics; the trainer logs their means. sequence_clip: whether the trainer's
    clip fractions count sequences, else tokens; None: they fit neither count, so that rows have no clip metrics.
    writer: a `RunWriter` on the main process during training; without one no rows are written.
    """

    def __init__(self, ranks: Ranks, log: Mapping[str, list[float]], sequence_clip: bool | None) -> None:
        self.ranks, self.log, self.sequence_clip = ranks, log, sequence_clip
        self.grad_norm = float("nan")
        self.begin(None)

    def begin(self, writer: Any) -> None:
        """Start or resume training with a writer or None; forget what an interrupted update left."""
        self.writer = writer
        self.step: int | None = None
        self.minibatches: list[Minibatch] = []
        self.loss = 0.0

    def scored(self, responses: int, updates: int, batches: int, rewards: Callable[[], Mapping[str, float]]) -> None:
        """Begin the step of a batch that was sampled and scored, and write its rollout row.

        `updates`, `batches`: numbers of updates and batches before this one, for when training begins or is resumed.
        `rewards`: gives the row's reward metrics, as the catalogue defines them.

        Raises:
            RoutingError: training begins anew in a folder that has rows.
        """
        if self.step is None and self.writer is not None and self.writer.next_step:
            if not updates:
                raise RoutingError(
                    f"{self.writer.folder} has rows of {self.writer.next_step} batches, and training begins anew: pass "
                    "resume_from_checkpoint to train(), or choose another run_folder"
                )
            self.writer.keep_updates(rows_until(self.writer, updates))
            # A checkpoint may lie between two updates of a batch; after a resume, a new batch is sampled.
            batches = self.writer.next_step
        self.step = batches if self.step is None else self.step + 1
        responses = int(self.ranks.sums(torch.tensor([responses])))
        if self.writer is not None:
            lengths = self.log.get("completions/mean_length")
            found = {"response_length": lengths[-1]} if lengths else {}
            self.writer.rollout(self.step, **{"reward_n": responses, **rewards(), **found})

    def engine(
        self,
        sampled: RoutedExperts,
        probes: Sequence[ProbeBatch],
        replayed: Float[Tensor, "b C"],
        sampling_logps: Float[Tensor, "b C"] | None,
    ) -> None:
        """Compare the engine that sampled the probed sequences with the trained policy at equal weights; write rows.

        sampled: the engine's routes. replayed: the policy's log-probabilities under these routes. sampling_logps: the
        engine's log-probabilities; NaN for tokens without one, which no gap counts; None if there are none: then no
        process compares log-probabilities. All in nats.
        """
        own, tokens = RoutedExperts.cat([p.routes for p in probes]), torch.cat([p.tokens for p in probes])
        counts = self.ranks.counts(change_counts(sampled, own, tokens, pair="engines"))
        self._log_value("engine_slot_change", counts.rates()["slot_change"])
        rows: dict[str, dict[str, Any]] = {"engines": change_metrics(counts)}
        silent = self.ranks.sums(torch.tensor([sampling_logps is None]).long())  # all processes gather, or none
        if sampling_logps is not None and not silent.any():
            sampling = self.ranks.rows(sampling_logps)
            mask = self.ranks.rows(torch.cat([p.mask for p in probes])).bool() & ~sampling.isnan()
            live = torch.cat([p.logps for p in probes])
            for pair, suffix, logps in (("engines", "", live), ("engines_replayed", "_replayed", replayed)):
                gaps = engine_metrics(self.ranks.rows(logps), sampling, mask)
                rows[pair] = {**gaps, **rows.get(pair, {})}
                for name in GAPS:
                    self._log_value(f"engine_{name}{suffix}", float(gaps[name]))
        if self.writer is not None and self.step is not None:
            for pair, row in rows.items():
                self.writer.engine(self.step, pair, **row)

    def update(self, update: int, taken: int, lr: float, aux_loss_coef: float | None) -> None:
        """Write the metrics of the update that the optimizer has made with the micro-batches since the last call.

        `taken`: optimizer steps of the training so far. aux_loss_coef: coefficient of the load-balancing loss, if the
        trainer's loss includes it."""
        parts, self.minibatches = self.minibatches, []
        loss, self.loss = self.loss, 0.0
        if not parts:
            return
        rows = self.ranks.sums(torch.tensor([[p.replayed_rows, p.routed_rows] for p in parts]).sum(0)).tolist()
        if rows[1]:  # else no sequence of the update had routes: the fraction is undefined, not 0
            self._log_value("replayed_fraction", rows[0] / rows[1])
        first = [p.first_change for p in parts if p.first_change is not None]
        if first:
            self._log_value("first_change", self.ranks.most(max(first)))
        tensors: Any = zip(*((p.old_logps, p.logps, p.mask) for p in parts), strict=True)
        old, new, mask = (self.ranks.rows(joined(of_all)) for of_all in tensors)
        mask = mask.bool()
        tokens = self.ranks.sums(torch.stack([p.mask.sum() for p in parts]))
        sequences = self.ranks.sums(torch.stack([p.mask.bool().any(1).sum() for p in parts]))
        ceiling = int(self.ranks.sums(torch.stack([p.ceiling_tokens() for p in parts]).sum()))
        if tokens.sum():
            self._log_value("ceiling_fraction", ceiling / float(tokens.sum()))
        found = torch.tensor([[p.clipped_tokens, p.clipped_sequences, not p.mean_is_of_tokens] for p in parts]).sum(0)
        *clipped, of_rows = self.ranks.sums(found).tolist()
        aux = [p.aux_loss for p in parts if p.aux_loss is not None]
        loss, aux_loss = (
            self.ranks.sums(torch.tensor([loss, sum(aux)])) / self.ranks.accelerator.num_processes
        ).tolist()
        if self.writer is None or self.step is None:  # no step: an earlier train() sampled this batch
            return
        row: dict[str, Any] = {"loss": loss, "lr": lr, "grad_norm": self.grad_norm, TAKEN: taken}
        row |= {"tokens": int(tokens.sum()), "sequences": int(sequences.sum()), "ceiling_tokens": ceiling}
        row |= {"aux_loss": aux_loss / len(parts), "aux_loss_coef": aux_loss_coef} if aux else {}
        row |= {"replayed_rows": rows[0], "routed_rows": rows[1]}
        row |= update_ratio_metrics(token_log_ratio(new, old, mask), sequence_log_ratio(new, old, mask), mask)
        entropy, region = (
            torch.tensor(self.log.get(name, [])[-len(parts) :], dtype=torch.float64)
            for name in ("entropy", "clip_ratio/region_mean")
        )
        if len(entropy) == len(parts) and not of_rows:
            row["entropy"] = float((entropy * (tokens / tokens.sum())).sum())
        if len(region) == len(parts) and self.sequence_clip is not None:  # else there is no clip, or it is not known
            if self.sequence_clip:
                row |= {"clipped_tokens": clipped[0], "clipped_sequences": clipped[1]}
            elif not of_rows:
                row["clipped_tokens"] = round(float((region * tokens).sum()))
        self.writer.update(self.step, update, **row)

    def _log_value(self, name: str, value: float) -> None:
        """Add a value to the trainer's log unless it is NaN (no or one token), which would make the log's mean NaN."""
        if not math.isnan(value):
            self.log[f"routing/{name}"].append(value)

    def probed(self, update: int, counts: ChangeCounts, metrics: dict[str, Any]) -> None:
        """Write what `measure` returned after an update."""
        rates = counts.rates()
        found = {name: rates[name] for name in CHANGES} | {name: metrics[name] for name in VARIANCES + LOADS}
        found["max_vio"] = metrics["site_max_vio"].nanmean()
        tokens = counts.tokens_total
        found["f2_natural"] = int(metrics["extreme_2_natural"]) / tokens if tokens else float("nan")
        for name, value in found.items():
            self._log_value(name, float(value))
        if self.writer is not None and self.step is not None:
            self.writer.probe(self.step, update, **metrics)


def rows_until(writer: Any, updates: int) -> int:
    """Return how many update rows of a run folder are of the first `updates` optimizer steps.

    Rows may begin later than the training, if the run folder was first named in a resumed training."""
    rows = (row for _, row in read_rows(writer.folder / "metrics.jsonl") if row["kind"] == "update")
    return sum(row.get(TAKEN, place) <= updates for place, row in enumerate(rows, start=1))
