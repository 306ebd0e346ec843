"""Measurements on a fixed subset after each update, the same in every arm, whatever the arm does itself.

Under replay the change rate is zero by construction, so the probe routes live; a second forward replays the old
policy's routes on the same weights. The difference between the two is what routing adds to the log-ratio.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives import sequence_log_ratio, token_log_ratio
from moe_rl.routing import (
    RoutedExperts,
    change_counts,
    flips_per_token,
    record_routes,
    replay_routes,
)
from moe_rl.training.batch import Batch
from moe_rl.training.engine_gap import log_rollout_to_new
from moe_rl.training.runlog import write_table

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


def ratio_facts(
    log_ratio: Float[Tensor, "B T"],
    sequence_log_ratio: Float[Tensor, "B"],
    clipped: Bool[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, Any]:
    """What one update saw: clipped tokens and sequences with their totals, variance of log-ratios, KL estimates.

    k1 = mean(-log r) and k3 = mean(r - 1 - log r), r = new / old on the old policy's tokens, estimate
    KL(old || new) in nats per token (Schulman, "Approximating KL divergence").
    """
    tokens = log_ratio[mask]
    rows = mask.any(1)
    return {
        "clipped_tokens": (clipped & mask).sum(),
        "tokens": mask.sum(),
        "clipped_sequences": (clipped & mask).any(1).sum(),
        "sequences": rows.sum(),
        "var_token_log_ratio": tokens.var(),
        "var_sequence_log_ratio": sequence_log_ratio[rows].var(),
        "k1": (-tokens).mean(),
        "k3": (tokens.exp() - 1 - tokens).mean(),
    }


class Probe:
    """One step's probe: a subset of its batch, measured against the batch's old policy after each update."""

    def __init__(self, trainer: "Trainer", batch: Batch):
        config = trainer.config.probe
        self.trainer = trainer
        self.rows = torch.linspace(0, len(batch) - 1, config.sequences).round().long()
        self.part = batch.rows(self.rows)
        self.keep = bool(config.tokens_every) and trainer.step % config.tokens_every == 0
        self.columns: list[dict[str, Any]] = []

    def __call__(self, update: int) -> None:
        """Measure the policy after `update`."""
        facts, natural, replayed, routes = measure(self.trainer, self.part)
        self.trainer.log.append("probe", self.trainer.step, update=update, **facts)
        log_rollout_to_new(self.trainer, self.part, update, natural, routes)
        if self.keep:
            self.columns.append(token_columns(self.part, update, self.rows, natural, replayed, routes))
            self._save_routes(update, routes)

    def finish(self) -> None:
        """Write the step's per-token facts."""
        if self.columns:
            self._save_routes(0, self.part.routes)
            table: dict[str, Any] = {
                key: torch.cat([c[key] for c in self.columns]).cpu().numpy() for key in self.columns[0]
            }
            pieces = token_pieces(self.trainer.tokenizer, table["token"].tolist())
            table["text"] = [pieces[token] for token in table["token"].tolist()]
            about = prompt_texts(self.trainer.tokenizer, self.part, self.rows)
            write_table(self.trainer.folder / "tokens" / f"step_{self.trainer.step:06d}.parquet", table, about)

    def _save_routes(self, update: int, routes: RoutedExperts) -> None:
        """Update 0 is the old policy."""
        step = f"step_{self.trainer.step:06d}"
        routes.save(self.trainer.folder / "routes" / f"{step}_update_{update}.safetensors")


@torch.no_grad()
def measure(trainer: "Trainer", part: Batch) -> tuple[dict[str, Any], Tensor, Tensor, RoutedExperts]:
    """One forward with live routing and one with the old routes; the facts, and per-token log-probabilities."""
    model, mask = trainer.model, part.completion_mask
    model.eval()
    with record_routes(model) as recording:
        natural = trainer.logps(model, part, entropy=True)
    with replay_routes(model, part.routes):
        replayed = trainer.logps(model, part).logps
    counts = change_counts(part.routes, recording.routes, mask)
    facts: dict[str, Any] = {
        "slots_changed": counts.slots_changed,
        "slots": counts.slots_total,
        "sites_changed": counts.sites_changed,
        "sites": counts.sites_total,
        "tokens_changed": counts.tokens_changed,
        "tokens": counts.tokens_total,
        "site_names": counts.sites,
        "site_slots_changed": counts.per_site_slots_changed,
        "site_slots": counts.per_site_slots_total,
        "flips_histogram": counts.flips,
        "deviation_histogram": counts.deviation,
        "overdispersion": counts.overdispersion,
        "entropy": natural.entropy[mask].mean(),
    }
    for name, logps in (("natural", natural.logps), ("replayed", replayed)):
        tokens = token_log_ratio(logps, part.live_old_logps, mask)[mask]
        facts[f"var_token_{name}"] = tokens.var()
        facts[f"var_sequence_{name}"] = sequence_log_ratio(logps, part.live_old_logps, mask).var()
        facts[f"k1_{name}"] = (-tokens).mean()
        facts[f"k3_{name}"] = (tokens.exp() - 1 - tokens).mean()
    return facts, natural.logps, replayed, recording.routes


def token_pieces(tokenizer: Any, tokens: Iterable[int]) -> dict[int, str]:
    """The text of every distinct token as it stands inside a text: what decoding it twice adds to decoding it once.

    Decoded alone, tokens of some vocabularies lose their leading space. Special tokens keep their names; a token that
    is part of a character shows the replacement character.
    """
    known = sorted(set(tokens))
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    once = tokenizer.batch_decode([[token] for token in known], **options)
    twice = tokenizer.batch_decode([[token, token] for token in known], **options)
    return {t: b[len(a) :] if b.startswith(a) else a for t, a, b in zip(known, once, twice, strict=True)}


def prompt_texts(tokenizer: Any, part: Batch, rows: Tensor) -> dict[str, Any]:
    """What a token view needs besides the tokens: by `seq`, the prompt's text and the column of position 0, where the
    stored routes of the response begin."""
    first = part.completion_mask.int().argmax(1).tolist()
    prompts = [
        ids[:start][mask[:start]].tolist()
        for ids, mask, start in zip(part.input_ids.cpu(), part.attention_mask.cpu().bool(), first, strict=True)
    ]
    texts = tokenizer.batch_decode(prompts, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"seq": rows.tolist(), "prompt": texts, "first": first}


def token_columns(
    part: Batch, update: int, rows: Tensor, natural: Tensor, replayed: Tensor, routes: RoutedExperts
) -> dict[str, Tensor]:
    """Per-token facts of one probe, one row per response token."""
    mask = part.completion_mask
    B, T = mask.shape
    flips = flips_per_token(part.routes, routes)
    first = mask.int().argmax(1, keepdim=True)

    def take(x: Tensor) -> Tensor:
        return x.expand(B, T)[mask]

    return {
        "seq": take(rows[:, None]).int(),
        "pos": take(torch.arange(T, device=mask.device)[None] - first).int(),
        "token": take(part.input_ids).int(),
        "update": torch.full((int(mask.sum()),), update, dtype=torch.int32),
        "old_logp": take(part.live_old_logps).float(),
        "logp_natural": take(natural).float(),
        "logp_replayed": take(replayed).float(),
        "flips": take(flips).int(),
        "reward": take(part.rewards[:, None]).float(),
    }
