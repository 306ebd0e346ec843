"""Parquet tables of a probed step: values and routes of every response token after every update."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.measure.router_shift import gates_and_margins
from moe_rl.routing import RoutedExperts, flips_per_token
from moe_rl.tables import write_table
from moe_rl.training.batch import Batch
from moe_rl.training.levers import only_rows
from moe_rl.training.route_tables import write_route_changes, write_route_table


@dataclass(frozen=True)
class Observation:
    """Measurements of the probed responses after one update.

    Attributes:
        natural, replayed: log-probabilities (nats) under live and under the old routes.
        routes: the live routes.
        routers: gates and margins of the n response tokens (`gates_and_margins`), before the step's updates and after
            this one: `old_gates`, `new_gates` [n,L,K], `old_margins`, `new_margins` [n,L], on the CPU; empty for a
            family that does not return router logits as one tensor per site.
    """

    update: int
    natural: Float[Tensor, "B T"]
    replayed: Float[Tensor, "B T"]
    routes: RoutedExperts
    routers: dict[str, Tensor] = field(default_factory=dict)


def routers_said(
    name: str, mask: Bool[Tensor, "B T"], logits: list[Tensor], routes: RoutedExperts
) -> dict[str, Tensor]:
    """Return gates and margins of the experts chosen for the tokens of `mask`: one half of `Observation.routers`.

    name: "old" or "new", the prefix of the keys."""
    ids = routes.ids.to(mask.device)[mask].sort(-1).values  # in the order of route tables
    gates, margins = gates_and_margins(logits, ids)
    return {f"{name}_gates": gates.cpu(), f"{name}_margins": margins.cpu()}


def write_probe_tables(
    folder: Path, step: int, tokenizer: Any, part: Batch, rows: Tensor, observations: list[Observation]
) -> None:
    """Write `tokens/step_NNNNNN.parquet` and `routes/step_NNNNNN_update_U.parquet` to a run folder.

    The files of routes hold those of the old policy (update 0) and, for each update, the changes since then. Padding
    has no route and token -1.

    Args:
        part: the probed responses, which are the rows `rows` of the step's batch.
    """
    name = f"step_{step:06d}"
    old = folder / "routes" / f"{name}_update_0.parquet"
    routes = _without_padding(part.routes, part.attention_mask)
    write_route_table(old, routes)
    for seen in observations:
        path = old.with_name(f"{name}_update_{seen.update}.parquet")
        write_route_changes(path, _without_padding(seen.routes, part.attention_mask), old, routes)
    columns = [token_columns(part, seen, rows) for seen in observations]
    table: dict[str, Any] = {key: _column(torch.cat([c[key] for c in columns])) for key in columns[0]}
    written = table["token"].tolist()
    pieces = token_pieces(tokenizer, written)
    table["text"] = [pieces[token] for token in written]
    write_table(folder / "tokens" / f"{name}.parquet", table, prompt_texts(tokenizer, part, rows))


def _without_padding(routes: RoutedExperts, mask: Bool[Tensor, "B T"]) -> RoutedExperts:
    """Return the routes with no route and no token (-1) on padding."""
    routes = only_rows(routes, mask[..., None])
    tokens = routes.tokens
    return routes if tokens is None else routes._with(routes.packed, tokens.where(mask.to(tokens.device).bool(), -1))


def token_pieces(tokenizer: Any, tokens: Iterable[int]) -> dict[int, str]:
    """Return the text of each distinct token as inside a text: what decoding it twice adds to decoding it once.

    Decoded alone, tokens of some vocabularies lose their leading space. Special tokens keep their names; a token that
    is part of a character shows the replacement character.
    """
    known = sorted(set(tokens))
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    once = tokenizer.batch_decode([[token] for token in known], **options)
    twice = tokenizer.batch_decode([[token, token] for token in known], **options)
    return {t: b[len(a) :] if b.startswith(a) else a for t, a, b in zip(known, once, twice, strict=True)}


def prompt_texts(tokenizer: Any, part: Batch, rows: Tensor) -> dict[str, Any]:
    """Return the prompt's text and the column of position 0 for each `seq`, which a token view needs besides tokens.

    The stored routes of the response begin in that column."""
    first = part.completion_mask.int().argmax(1).tolist()
    prompts = [
        ids[:start][mask[:start]].tolist()
        for ids, mask, start in zip(part.input_ids.cpu(), part.attention_mask.cpu().bool(), first, strict=True)
    ]
    texts = tokenizer.batch_decode(prompts, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"seq": rows.tolist(), "prompt": texts, "first": first}


def token_columns(part: Batch, seen: Observation, rows: Tensor) -> dict[str, Tensor]:
    """Return the columns of the token table for one update, one row per response token; on the CPU."""
    mask = part.completion_mask
    B, T = mask.shape
    flips = flips_per_token(part.routes, seen.routes)
    first = mask.int().argmax(1, keepdim=True)

    def take(x: Tensor) -> Tensor:
        return x.expand(B, T)[mask].cpu()

    return {
        "seq": take(rows[:, None].to(mask.device)).int(),
        "pos": take(torch.arange(T, device=mask.device)[None] - first).int(),
        "token": take(part.input_ids).int(),
        "update": torch.full((int(mask.sum()),), seen.update, dtype=torch.int32),
        "old_logp": take(part.live_old_logps).float(),
        "logp_natural": take(seen.natural).float(),
        "logp_replayed": take(seen.replayed).float(),
        "flips": take(flips).int(),
        "reward": take(part.rewards[:, None]).float(),
        **{name: values.flatten(1).float() for name, values in seen.routers.items()},
    }


def _column(values: Tensor) -> Any:
    """Return a column of the table: an array for one number per row, lists of fixed size for several."""
    import pyarrow as pa

    array = values.numpy()
    return array if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
