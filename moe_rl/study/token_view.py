"""The token view: responses of a stored step, with the old and new log-probabilities and experts of each token.

`TokenStep` reads what the probe wrote; `token_view_html` puts a few responses into a page as a fragment that needs no
network. The live page shows the same view of the same data.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from moe_rl.study.arms import full_label
from moe_rl.study.data import StudyData, StudyDataError
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.figures.screen import scales
from moe_rl.study.folders import read_parquet
from moe_rl.tables import header_of

MOST_TOKENS = 4096
"""Most tokens of one response that are shown."""
REPORT_BYTES = 300_000
"""Most bytes of data of a token view inside a report."""
REPORT_TOKENS = 512


class TokenStep:
    """The tokens of one stored step of a run, and the routes of these tokens where routes were kept.

    Raises StudyDataError for a step that was not stored, or files that do not fit each other.
    """

    def __init__(self, folder: Path, step: int):
        self.folder, self.step = folder, step
        path = tokens_file(folder, step)
        if not path.exists():
            raise StudyDataError(f"{folder}: no tokens of step {step}; stored are {stored_steps(folder) or 'none'}")
        table = read_parquet(path)
        self.table, about = table.to_pandas(), header_of(table)
        self.sequences = [int(seq) for seq in about.get("seq") or pd.unique(self.table["seq"])]
        self.prompts: list[str] = about.get("prompt") or [""] * len(self.sequences)
        self._first: list[int] | None = about.get("first")
        self.updates = sorted(int(update) for update in self.table["update"].unique())
        self._routes: dict[int, Any] = {}

    @cached_property
    def routed(self) -> bool:
        """Whether the route files of the old policy and of every update exist."""
        return all(self._path(update).exists() for update in (0, *self.updates))

    def index(self) -> dict[str, Any]:
        """Return the responses and updates to choose from, and `top`, the largest number of changes at a token."""
        own = {seq: updates for seq in self.sequences if (updates := self.updates_of(seq))}
        changed = {(seq, update): self.changed(seq, update) for seq in own for update in own[seq]}
        routes = self.routes(0) if self.routed else None
        return {
            "step": self.step,
            "updates": self.updates,
            "responses": [
                {
                    "seq": seq,
                    "updates": updates,
                    "reward": _rounded(self.rows(seq, updates[-1])["reward"].iloc[0]),
                    "tokens": len(changed[seq, updates[-1]]),
                    "changed": int(changed[seq, updates[-1]].sum()),
                }
                for seq, updates in own.items()
            ],
            "top": max(int(counts.max()) for counts in changed.values()),
            "unit": "experts" if routes else "sites",
            **labelled(routes.sites if routes else ()),
            "slots": math.prod(routes.shape[2:]) if routes else 0,
        }

    def response(self, seq: int, update: int, most: int = MOST_TOKENS, routers: bool = False) -> dict[str, Any]:
        """Return one response after one update; lists have one entry for each of the first `most` tokens.

        `whole`: of all tokens of the response the number of `tokens`, of tokens with a change (`touched`) and of
        changes (`changed`), and the mean `log_ratio` with live routing in nats per token, None if it is not finite.
        `old_experts`: [T][L][K] ids, -1 where no route is known; `new_experts`: per token only the sites whose set of
        experts changed, {site index: [K]}; both None where routes were not kept.

        routers: include router outputs where they were kept: `old_gates`, `new_gates` [T][L][K], the share that each
            chosen expert has in the softmax over all experts, in the order of the stored ids; `old_margins` and
            `new_margins` [T][L], s_(k) - s_(k+1) in logits.
        """
        every, changed = self.rows(seq, update), self.changed(seq, update)
        log_ratio = (every["logp_natural"].astype(float) - every["old_logp"]).mean(skipna=False)
        rows = every.iloc[:most]
        text = rows["text"].astype(str).tolist() if "text" in rows else [f"⟨{token}⟩" for token in rows["token"]]
        found: dict[str, Any] = {
            "seq": seq,
            "update": update,
            "reward": _rounded(rows["reward"].iloc[0]) if len(rows) else None,
            "prompt": self.prompts[self.sequences.index(seq)],
            "whole": {
                "tokens": len(every),
                "touched": int((changed > 0).sum()),
                "changed": int(changed.sum()),
                "log_ratio": _rounded(log_ratio),
            },
            "left_out": len(every) - len(rows),
            "text": text,
            "position": rows["pos"].tolist(),
            "token": rows["token"].tolist(),
            **{name: _listed(rows[name].to_numpy(), 9) for name in ("old_logp", "logp_natural", "logp_replayed")},
            "changed": changed[:most].tolist(),
            "old_experts": None,
            "new_experts": None,
        }
        if self.routed:
            old, new = (self.experts(seq, u)[:most] for u in (0, update))
            differ = (np.sort(old, -1) != np.sort(new, -1)).any(-1)
            found["old_experts"] = old.tolist()
            found["new_experts"] = [
                {int(site): new[t, site].tolist() for site in np.flatnonzero(differ[t])} for t in range(len(old))
            ]
            if routers and "old_gates" in rows:
                for name, shape in (("gates", old.shape[1:]), ("margins", old.shape[1:2])):
                    for which in ("old", "new"):
                        values = np.stack([np.asarray(x, dtype=float) for x in rows[f"{which}_{name}"]])
                        found[f"{which}_{name}"] = _listed(values.reshape(len(old), *shape), 4)
                found["new_sets"] = new.tolist()  # gates are in the order of these
        return found

    def rows(self, seq: int, update: int) -> pd.DataFrame:
        """Return the table's rows of one response after one update. Raises StudyDataError if there are none."""
        rows = self._rows.get((seq, update))
        if rows is None:
            raise StudyDataError(
                f"{self.folder} step {self.step}: no response {seq} after update {update}; stored are responses "
                f"{self.sequences} and updates {self.updates}"
            )
        return rows

    def updates_of(self, seq: int) -> list[int]:
        """Return the updates after which a response was stored: not all of them if an update is of a minibatch."""
        return [update for update in self.updates if (seq, update) in self._rows]

    @cached_property
    def _rows(self) -> dict[Any, pd.DataFrame]:
        return dict(iter(self.table.sort_values("pos", kind="stable").groupby(["seq", "update"])))

    def changed(self, seq: int, update: int) -> np.ndarray:
        """Return the experts exchanged per token, summed over sites; without routes, the changed sites per token."""
        if not self.routed:
            return self.rows(seq, update)["flips"].to_numpy()
        old, new = (self.experts(seq, u) for u in (0, update))
        return slots_left(old, new).sum((-2, -1))

    def experts(self, seq: int, update: int) -> np.ndarray:
        """Return the expert ids [T,L,K] of a response's tokens after an update; update 0 is the old policy."""
        row, rows = self.sequences.index(seq), self.rows(seq, self.updates_of(seq)[0])
        columns, part = self.first(row) + rows["pos"].to_numpy(), self.routes(update).rows(row)
        if part.tokens is not None:
            line, known = part.tokens[0].numpy(), rows["token"].to_numpy()
            if columns[-1] >= len(line) or (line[columns] != known).any():
                raise self._other_tokens(update)
        return part.ids[0].numpy()[columns]

    def all_experts(self, update: int) -> np.ndarray:
        """Return the expert ids [N,L,K] of all stored tokens, response after response, as `experts` returns them."""
        return np.concatenate([self.experts(seq, update) for seq in self.sequences if self.updates_of(seq)])

    def first(self, row: int) -> int:
        """Return the column of the routes at which a response begins; search its tokens if the files do not say it."""
        if self._first is not None:
            return int(self._first[row])
        tokens = self.routes(0).tokens
        seq = self.sequences[row]
        rows = self.rows(seq, self.updates_of(seq)[0])
        wanted, offsets = rows["token"].to_numpy(), rows["pos"].to_numpy()
        if tokens is not None:
            line = tokens[row].numpy()
            for start in range(len(line) - int(offsets[-1])):
                if (line[start + offsets] == wanted).all():
                    return start
        raise self._other_tokens(0)

    def _other_tokens(self, update: int) -> StudyDataError:
        return StudyDataError(f"{self._path(update)}: its tokens are not those of tokens/step_{self.step:06d}.parquet")

    def routes(self, update: int) -> Any:
        """Return the RoutedExperts after an update, one row per response; each file is read once.

        Raises StudyDataError for a damaged file.
        """
        if update not in self._routes:
            from moe_rl.routing import RoutingError  # importing torch takes seconds
            from moe_rl.training.route_tables import read_route_table

            try:
                routes = read_route_table(self._path(update))
            except RoutingError as error:
                raise StudyDataError(str(error)) from error
            if routes.shape[0] != len(self.sequences):
                raise StudyDataError(
                    f"{self._path(update)}: {routes.shape[0]} responses, tokens of {len(self.sequences)}; the files "
                    "are of different runs or steps"
                )
            self._routes[update] = routes
        return self._routes[update]

    def _path(self, update: int) -> Path:
        return self.folder / "routes" / f"step_{self.step:06d}_update_{update}.parquet"


def slots_left(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return a mask of the slots of `old` [..., L, K] whose expert `new` lacks at the site.

    The mask is False where a route is unknown.
    """
    left = np.repeat(((old >= 0) & (new >= 0)).all(-1, keepdims=True), old.shape[-1], -1)
    for k in range(new.shape[-1]):  # so that no [..., L, K, K] is in memory
        left &= old != new[..., k : k + 1]
    return left


def labelled(sites: Sequence[str]) -> dict[str, Any]:
    """Return the names of routing sites and their labels on pages."""
    labels, common = short_sites(list(sites))
    return {"sites": list(sites), "labels": labels, "common": common}


def tokens_file(folder: Path, step: int) -> Path:
    """Return the path at which a run folder holds the tokens of a step."""
    return folder / "tokens" / f"step_{step:06d}.parquet"


def stored_steps(folder: Path) -> list[int]:
    """Return the steps of which a run folder holds tokens."""
    found = (re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in (folder / "tokens").glob("step_*.parquet"))
    return sorted(int(match[1]) for match in found if match)


def token_view_html(data: StudyData, limit: int = REPORT_BYTES) -> Markup:
    """Return the token view of one stored step as an HTML fragment that contains its data, style and script.

    It shows the last stored step of the first run (arms in the study's order) that stored tokens; the fragment is empty
    if no run did.

    Args:
        limit: bytes of data; as many responses as fit are taken, spread over those of the step, at least one.
    """
    runs = (run for arm in data.arms.index for run in data.runs_of(str(arm)))
    chosen = next((run for run in runs if stored_steps(run.folder)), None)
    if chosen is None:
        return Markup("")
    stored = TokenStep(chosen.folder, stored_steps(chosen.folder)[-1])
    index = stored.index()
    responses: dict[str, Any] = {}
    size = len(json.dumps(index))
    for seq in evenly(stored.sequences):
        parts = {f"{seq}/{u}": stored.response(seq, u, REPORT_TOKENS) for u in stored.updates_of(seq)}
        size += len(_dump(parts))
        if responses and size > limit:
            break
        responses |= parts
    kept = {int(name.split("/")[0]) for name in responses}
    index["responses"] = [response for response in index["responses"] if response["seq"] in kept]
    name = f"{full_label(data, chosen.arm)}, seed {chosen.seed}"
    content = {"run": name, "index": index, "responses": responses, "scales": scales()}
    about = (
        f"{name}, step {stored.step}: {len(kept)} of the {len(stored.sequences)} responses that were stored. The old "
        "policy is the one that sampled them; after each update of the step the same tokens were scored again, routed "
        "live and with the old routes replayed. moe-rl watch shows every run and stored step."
    )
    script = static("token_view.js") + "\nmoeRL.inlineTokenView();"
    return Markup(  # safe: own files, and data in which no tag can begin
        f"<style>{static('token_view.css')}</style>\n"
        f'<p class="quiet small">{escape(about)}</p>\n'
        '<div class="tv" id="token-view"><noscript>The token view needs JavaScript.</noscript></div>\n'
        f'<script type="application/json" id="token-view-data">{_dump(content)}</script>\n'
        f"<script>\n{script}\n</script>"
    )


def static(name: str) -> str:
    """Return a file of the page in `moe_rl/study/static` as text."""
    return (files("moe_rl.study") / "static" / name).read_text(encoding="utf-8")


def evenly(items: Sequence[int]) -> Iterator[int]:
    """Yield the items in an order in which the first ones are far apart: ends, middle, quarters, ...

    >>> list(evenly([0, 1, 2, 3, 4]))
    [0, 4, 2, 1, 3]
    """
    seen: set[int] = set()
    parts = 1
    while len(seen) < len(items):
        for i in range(parts + 1):
            place = round(i * (len(items) - 1) / parts)
            if place not in seen:
                seen.add(place)
                yield items[place]
        parts *= 2


def _dump(content: Any) -> str:
    """Return JSON that may stand inside <script>: it contains no `<`, so that no tag can begin or end in it."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _listed(values: np.ndarray, digits: int) -> list[Any]:
    """Return nested lists of numbers with so many digits (nine tell any two of 32 bits apart), None if not finite."""
    values = values.astype(float)
    size = np.where(np.isfinite(values) & (values != 0), abs(values), 1.0)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(size)))
    listed = (np.round(values * scale) / scale).astype(object)
    listed[~np.isfinite(values)] = None
    return list(listed.tolist())


def _rounded(value: Any) -> float | None:
    """Return a number with six digits, as pages get it; None for a value that is None or not finite."""
    return None if value is None or not np.isfinite(value) else float(f"{float(value):.6g}")
