"""How many tokens each expert got, of the old policy and after the last update, summed over a run's stored steps."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.study.figures.routing import short_sites
from moe_rl.study.token_view import TokenStep, stored_steps


def expert_counts(folder: Path, until: int | None = None) -> dict[str, Any]:
    """Tokens by site and expert over all stored steps up to `until`: `old` and `new` [L][E], counted over the response
    tokens' own positions; `moved` [L][E]: slots that left the expert (its old tokens that the new policy sends
    elsewhere). `steps` are those that were counted; sites are empty where no step's routes were kept."""
    total: dict[str, Any] | None = None
    counted = []
    for step in stored_steps(folder):
        if until is not None and step > until:
            break
        changed = (folder / "tokens" / f"step_{step:06d}.parquet").stat().st_mtime_ns
        counts = _step_counts(folder, step, changed)
        if counts is None:
            continue
        counted.append(step)
        if total is None:
            total = {**counts, "counts": counts["counts"].copy()}
        else:
            total["counts"] += counts["counts"]
    if total is None:
        return {"steps": [], "sites": [], "labels": [], "common": "", "old": [], "new": [], "moved": []}
    labels, common = short_sites(total["sites"])
    old, new, moved = total["counts"].tolist()
    about = {"steps": counted, "sites": total["sites"], "labels": labels, "common": common}
    return {**about, "old": old, "new": new, "moved": moved}


@lru_cache(maxsize=512)
def _step_counts(folder: Path, step: int, _changed: int) -> dict[str, Any] | None:
    """`counts` [3, L, E] (old, new, left) of one stored step; None where its routes were not kept."""
    stored = TokenStep(folder, step)
    if not stored.routed:
        return None
    routes = stored.routes(0)
    experts = routes.num_experts if isinstance(routes.num_experts, int) else max(routes.num_experts)
    counts = np.zeros((3, routes.shape[2], experts), dtype=np.int64)
    for seq in stored.sequences:
        positions = stored.rows(seq, stored.updates[-1])["pos"].to_numpy()
        old, new = (stored.experts(seq, update, positions) for update in (0, stored.updates[-1]))
        kept = (old[..., :, None] == new[..., None, :]).any(-1)
        for site in range(old.shape[1]):
            for which, ids in enumerate((old[:, site], new[:, site], old[:, site][~kept[:, site]])):
                counts[which, site] += np.bincount(ids[ids >= 0].ravel(), minlength=experts)
    return {"sites": list(routes.sites), "counts": counts}
