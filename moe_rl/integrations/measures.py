"""What is measured inside others' trainers: metrics of an update, a probe after it; for their log and for our rows."""

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
from moe_rl.routing import ChangeCounts, RoutedExperts, RoutingError, change_counts, record_routes, replay_routes
from moe_rl.routing.router_stats import active_set_churn, expert_load
from moe_rl.run_rows import read_rows

CHANGES = ("slot_change", "site_change", "token_change")
TAKEN = "trainer/global_step"
"""Of an update row: how many steps the optimizer had taken, over all of the training."""
VARIANCES = ("var_token_natural", "var_token_replayed", "var_sequence_natural", "var_sequence_replayed")
LOADS = ("load_cv_mean", "load_entropy_min")
GAPS = ("k3", "gap_mean")


class Ranks:
    """Sums and rows of all processes, through the trainer's accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.main = accelerator, bool(accelerator.is_main_process)

    def sums(self, values: Tensor) -> Tensor:
        """Elementwise sum over processes, on the CPU."""
        return self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").cpu()

    def most(self, value: float) -> float:
        """The largest of all processes."""
        values = torch.tensor([value], dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.gather(values).max())

    def rows(self, values: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "B2 T2"]:
        """All processes' sequences, padded on the right to one length."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def counts(self, counts: ChangeCounts) -> ChangeCounts:
        deviation, flips, incomplete = counts.site_deviation, counts.flips, torch.tensor([counts.incomplete_tokens])
        parts = [self.sums(x) for x in (deviation, flips, incomplete)]
        return replace(counts, site_deviation=parts[0], flips=parts[1], incomplete_tokens=int(parts[2]))


@dataclass(eq=False)
class Minibatch:
    """One forward of an update: what it is compared with, and what came out."""

    old_logps: Float[Tensor, "B T"]
    mask: Int[Tensor, "B T"]
    logps: Float[Tensor, "B T"] | None = None
    replayed_rows: int = 0
    routed_rows: int = 0
    first_change: float | None = None
    clipped_tokens: int = 0  # this and the next: where the trainer's clip fractions are of sequences
    clipped_sequences: int = 0
    aux_loss: float | None = None  # the model's load-balancing loss, where it is in the trainer's loss
    aux_share: float = 0.0  # what it adds to that


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """Sequences of a batch that one call of the model scores after each update, live and under the old routes.

    score: the trainer's own scoring of them: log-probabilities `[b,C]` and entropies, or None.
    mask: true on the response tokens that are measured, `[b,C]`: the last C of the T tokens.
    logps: the old policy's, routing live, nats. routes: the experts that it chose then, under R3 too: at equal weights
    both replay them and choose them.
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
    """Change counts and metrics of the kind "probe", over all probes and processes; every process takes part."""
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
    """Collects an update's metrics over its micro-batches; writes the trainer's log and, with a writer, our rows.

    log: the trainer's own lists of training metrics, of which it logs the means. sequence_clip: whether its clip
    fractions are of sequences; None: of neither these nor the tokens that are counted here, so that rows have none.
    writer: a `RunWriter`, on the main process while it trains.
    """

    def __init__(self, ranks: Ranks, log: Mapping[str, list[float]], sequence_clip: bool | None) -> None:
        self.ranks, self.log, self.sequence_clip = ranks, log, sequence_clip
        self.grad_norm = float("nan")
        self.begin(None)

    def begin(self, writer: Any) -> None:
        """Training begins, or is resumed, with a writer or None; what an interrupted update left is gone."""
        self.writer = writer
        self.step: int | None = None
        self.minibatches: list[Minibatch] = []
        self.loss = 0.0

    def scored(self, responses: int, updates: int, batches: int, rewards: Callable[[], Mapping[str, float]]) -> None:
        """A batch was sampled and scored. `updates`, `batches`: how many there were before it, where training begins or
        is resumed. `rewards`: what its row says of its rewards, as the catalogue defines it.

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
            # A checkpoint may be inside a batch; after it, another one is sampled.
            batches = self.writer.next_step
        self.step = batches if self.step is None else self.step + 1
        responses = int(self.ranks.sums(torch.tensor([responses])))
        if self.writer is not None:
            lengths = self.log.get("completions/mean_length")
            found = {"response_length": lengths[-1]} if lengths else {}
            self.writer.rollout(self.step, reward_n=responses, **rewards(), **found)

    def engine(
        self,
        sampled: RoutedExperts,
        probes: Sequence[ProbeBatch],
        replayed: Float[Tensor, "b C"],
        sampling_logps: Float[Tensor, "b C"] | None,
    ) -> None:
        """The engine that sampled the probed sequences against the policy that is trained, at equal weights.

        sampled: the engine's routes. replayed: the policy's log-probabilities under them. sampling_logps: the engine's,
        NaN where it gave none, and the token counts in no gap; None where none are known: no process compares. Nats.
        """
        own, tokens = RoutedExperts.cat([p.routes for p in probes]), torch.cat([p.tokens for p in probes])
        counts = self.ranks.counts(change_counts(sampled, own, tokens, pair="engines"))
        self._say("engine_slot_change", counts.rates()["slot_change"])
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
                    self._say(f"engine_{name}{suffix}", float(gaps[name]))
        if self.writer is not None and self.step is not None:
            for pair, row in rows.items():
                self.writer.engine(self.step, pair, **row)

    def update(self, update: int, taken: int, lr: float, aux_loss_coef: float | None) -> None:
        """The optimizer has taken a step on the micro-batches since the last call; `taken`: steps of the training.
        aux_loss_coef: of the load-balancing loss, where that is in the trainer's loss."""
        parts, self.minibatches = self.minibatches, []
        loss, self.loss = self.loss, 0.0
        if not parts:
            return
        rows = self.ranks.sums(torch.tensor([[p.replayed_rows, p.routed_rows] for p in parts]).sum(0)).tolist()
        if rows[1]:  # else no sequence of the update came with routes: nothing was to be replayed, which is no 0
            self._say("replayed_fraction", rows[0] / rows[1])
        first = [p.first_change for p in parts if p.first_change is not None]
        if first:
            self._say("first_change", self.ranks.most(max(first)))
        tensors: Any = zip(*((p.old_logps, p.logps, p.mask) for p in parts), strict=True)
        old, new, mask = (self.ranks.rows(joined(of_all)) for of_all in tensors)
        mask = mask.bool()
        tokens = self.ranks.sums(torch.stack([p.mask.sum() for p in parts]))
        sequences = self.ranks.sums(torch.stack([p.mask.bool().any(1).sum() for p in parts]))
        clipped = self.ranks.sums(torch.tensor([[p.clipped_tokens, p.clipped_sequences] for p in parts]).sum(0))
        aux = [p.aux_loss for p in parts if p.aux_loss is not None]
        loss, aux_loss = (
            self.ranks.sums(torch.tensor([loss, sum(aux)])) / self.ranks.accelerator.num_processes
        ).tolist()
        if self.writer is None or self.step is None:  # None: an earlier train() sampled this batch
            return
        row: dict[str, Any] = {"loss": loss, "lr": lr, "grad_norm": self.grad_norm, TAKEN: taken}
        row |= {"tokens": int(tokens.sum()), "sequences": int(sequences.sum())}
        row |= {"aux_loss": aux_loss / len(parts), "aux_loss_coef": aux_loss_coef} if aux else {}
        row |= {"replayed_rows": rows[0], "routed_rows": rows[1]}
        row |= update_ratio_metrics(token_log_ratio(new, old, mask), sequence_log_ratio(new, old, mask), mask)
        entropy, region = (
            torch.tensor(self.log.get(name, [])[-len(parts) :], dtype=torch.float64)
            for name in ("entropy", "clip_ratio/region_mean")
        )
        if len(entropy) == len(parts):
            row["entropy"] = float((entropy * (tokens / tokens.sum())).sum())
        if len(region) == len(parts) and self.sequence_clip is not None:  # else no clip, or not known
            row["clipped_tokens"] = int(clipped[0]) if self.sequence_clip else round(float((region * tokens).sum()))
            row |= {"clipped_sequences": int(clipped[1])} if self.sequence_clip else {}
        self.writer.update(self.step, update, **row)

    def _say(self, name: str, value: float) -> None:
        """Into the trainer's log, but for NaN, of no token or a single one: the log's mean would be NaN, too."""
        if not math.isnan(value):
            self.log[f"routing/{name}"].append(value)

    def probed(self, update: int, counts: ChangeCounts, metrics: dict[str, Any]) -> None:
        """What `measure` found after the update."""
        rates = counts.rates()
        found = {name: rates[name] for name in CHANGES} | {name: metrics[name] for name in VARIANCES + LOADS}
        found["max_vio"] = metrics["site_max_vio"].nanmean()
        tokens = counts.tokens_total
        found["f2_natural"] = int(metrics["extreme_2_natural"]) / tokens if tokens else float("nan")
        for name, value in found.items():
            self._say(name, float(value))
        if self.writer is not None and self.step is not None:
            self.writer.probe(self.step, update, **metrics)


def rows_until(writer: Any, updates: int) -> int:
    """How many update rows of a folder are of the first `updates` optimizer steps. Rows may begin later than the
    training, in a folder that was first named when it was resumed."""
    rows = (row for _, row in read_rows(writer.folder / "metrics.jsonl") if row["kind"] == "update")
    return sum(row.get(TAKEN, place) <= updates for place, row in enumerate(rows, start=1))
