"""Measurements on a fixed subset after each update, the same in every arm, whatever the arm does itself.

Under replay the change rate is zero by construction, so the probe routes live; a second forward replays the old
policy's routes on the same weights. The difference between the two is what routing adds to the log-ratio.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
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
from moe_rl.training.facts import change_facts, load_facts, router_facts, spread_facts
from moe_rl.training.floor import log_floor
from moe_rl.training.logprobs import TokenLogps
from moe_rl.training.route_tables import write_route_table
from moe_rl.training.runlog import write_table

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


class Probe:
    """One step's probe: a subset of its batch, measured against the batch's old policy after each update."""

    def __init__(self, trainer: "Trainer", batch: Batch):
        config = trainer.config.probe
        self.trainer = trainer
        self.rows = torch.linspace(0, len(batch) - 1, config.sequences).round().long()
        self.part = batch.rows(self.rows)
        due = bool(config.tokens_every) and trainer.step % config.tokens_every == 0
        self.keep = due and trainer.accelerator.main
        self.columns: list[dict[str, Any]] = []
        if trainer.step == 0 and config.floor:
            log_floor(trainer, self.part)
        self.routers = old_router_logits(trainer, self.part)

    def __call__(self, update: int) -> None:
        """Measure the policy after `update`."""
        facts, natural, replayed, routes = measure(self.trainer, self.part, self.routers)
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
        write_route_table(self.trainer.folder / "routes" / f"{step}_update_{update}.parquet", routes)


@torch.no_grad()
def old_router_logits(trainer: "Trainer", part: Batch) -> list[Tensor]:
    """One `[n,E]` per routing site: what the routers say of the n response tokens before the step's updates. Under
    rollout lag these are newer than the policy that sampled the batch."""
    trainer.model.eval()
    out = trainer.logps(trainer.model, trainer.accelerator.mine(part), router_logits=True)
    return response_logits(trainer, out, part)


def response_logits(trainer: "Trainer", out: TokenLogps, part: Batch) -> list[Tensor]:
    """Router logits of all ranks on the response tokens; empty for a family that returns none."""
    B, T = part.completion_mask.shape
    own = [logits.detach() for logits in out.router_logits or () if logits.numel()]
    rows = len(out.logps)
    whole = [trainer.accelerator.gather(logits.reshape(rows, T, -1), B) for logits in own]
    return [logits[part.completion_mask.to(logits.device)] for logits in whole]


@torch.no_grad()
def measure(
    trainer: "Trainer", part: Batch, old_logits: list[Tensor]
) -> tuple[dict[str, Any], Tensor, Tensor, RoutedExperts]:
    """One forward with live routing and one with the old routes; the facts, and per-token log-probabilities."""
    model, mask, ranks = trainer.model, part.completion_mask, trainer.accelerator
    mine = ranks.mine(part)
    model.eval()
    with record_routes(model) as recording:
        live = trainer.logps(model, mine, entropy=True, router_logits=True)
    with replay_routes(model, mine.routes):
        replayed = ranks.gather(trainer.logps(model, mine).logps, len(part))
    entropy, natural = (ranks.gather(values, len(part)) for values in (live.entropy, live.logps))
    routes = ranks.gather_routes(recording.routes, len(part))
    facts = change_facts(change_counts(part.routes, routes, mask)) | {"entropy": entropy[mask].mean()}
    for name, logps in (("natural", natural), ("replayed", replayed)):
        log_ratio = token_log_ratio(logps, part.live_old_logps, mask)
        facts[f"var_token_{name}"] = log_ratio[mask].var()
        facts[f"var_sequence_{name}"] = sequence_log_ratio(logps, part.live_old_logps, mask).var()
        facts |= {f"{key}_{name}": value for key, value in spread_facts(log_ratio, mask).items()}
    facts |= load_facts(part.routes, routes, mask)
    logits = response_logits(trainer, live, part)
    if logits and len(logits) == len(old_logits):
        facts |= router_facts(old_logits, logits, part.routes.shape[-1])
    return facts, natural, replayed, routes


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
