"""Inline views for notebooks of what changed between two recordings of the same tokens.

from moe_rl.drift import plot

plot.change_heatmap(old.routes, new.routes)             # sites by positions; a new figure, or on axes with ax=
plot.change_by_site(old.routes, new.routes, ax=axes[1])
plot.tokens(old.routes, new.routes, tokenizer)          # the text, coloured by sites changed
"""

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Bool
from matplotlib.axes import Axes
from torch import Tensor

from moe_rl.routing import RoutedExperts, change_counts, flips_per_token, slot_change
from moe_rl.routing.counts import in_order_of
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.figures.saving import house_style

MOST_TOKENS = 4000
"""Most tokens that `tokens` shows; a longer page is slow."""


def change_heatmap(
    old: RoutedExperts, new: RoutedExperts, ax: Axes | None = None, *, mask: Bool[Tensor, "B T"] | None = None
) -> Axes:
    """Draw the slots changed, in percent, by routing site (shallow at the top) and position; mean over sequences.

    Args:
        old, new: routes of the same tokens (`recording.routes`).
        ax: where to draw, in your style; None: a new figure of pyplot in the house style, which a notebook shows.
        mask: True on the tokens that count; by default all. Cells where no token has a route on both sides stay empty.

    Returns:
        The axes.

    Raises:
        RoutingError: routes of other shapes, sites or tokens.
    """
    change_counts(old, new, mask)  # raises if routes do not fit each other
    new = in_order_of(old, new)
    known = (old.live | new.live).logical_not()
    counted = known if mask is None else known & mask.to(known.device)[..., None]
    changed = (slot_change(old, new) * counted).sum(0).T.cpu().numpy()
    of = counted.sum(0).T.cpu().numpy()
    grid = np.divide(100 * changed, of, out=np.full(of.shape, np.nan), where=of > 0)
    names, common = short_sites(list(old.sites))
    every = max(1, -(-len(names) // 12))
    with _axes(ax) as ax:
        image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        ax.set_yticks(range(0, len(names), every), names[::every])
        ax.set(xlabel="position", ylabel=f"site ({common})", title="Slots changed")
        ax.grid(False)
        ax.figure.colorbar(image, ax=ax, label="%")
    return ax


def change_by_site(
    old: RoutedExperts, new: RoutedExperts, ax: Axes | None = None, *, mask: Bool[Tensor, "B T"] | None = None
) -> Axes:
    """Draw the slots changed and the tokens whose set of experts differs, in percent, by routing site along the depth.

    Arguments, result and errors as in `change_heatmap`."""
    counts = change_counts(old, new, mask)
    names, common = short_sites(list(old.sites))
    every = max(1, -(-len(names) // 12))
    with _axes(ax) as ax:
        for label, changed, of, colour, marker in (
            ("site: the set differs", counts.per_site_changed, counts.per_site_total, "#0B4A8F", "s"),
            ("slot: experts replaced", counts.per_site_slots_changed, counts.per_site_slots_total, "#D55E00", "o"),
        ):
            ax.plot(range(len(names)), (100 * changed / of).numpy(), color=colour, marker=marker, ms=3, label=label)
        ax.set_xticks(range(0, len(names), every), names[::every])
        ax.set(xlabel=f"site ({common})", ylabel="changed, %")
        ax.set_ylim(bottom=0)
        ax.legend()
    return ax


class TokenChanges:
    """A text whose tokens are coloured by the share of sites that changed, which a notebook shows as HTML.

    html: the markup, with all text escaped and no script."""

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return f"TokenChanges(a page of {len(self.html):,} characters, which a notebook shows; .html)"

    def _repr_html_(self) -> str:
        return self.html


def tokens(
    old: RoutedExperts, new: RoutedExperts, tokenizer: Any, *, mask: Bool[Tensor, "B T"] | None = None
) -> TokenChanges:
    """Return the recorded tokens as text, each coloured by the share of its sites that changed.

    Each sequence is a paragraph. The pointer on a token shows which sites changed, with the experts exchanged.

    Args:
        old, new: routes that know their tokens, as recordings of `input_ids` do.
        tokenizer: anything with `decode`.
        mask: True on the tokens to show; by default all.

    Raises:
        ValueError: the routes do not know their tokens.
        RoutingError: as `change_heatmap`.
    """
    change_counts(old, new, mask)
    new = in_order_of(old, new)
    ids = old.tokens if old.tokens is not None else new.tokens
    if ids is None:
        raise ValueError("these routes do not know their tokens: record calls that are given input_ids")
    shown = ids >= 0 if mask is None else (ids >= 0) & mask.to(ids.device)
    flips, names = flips_per_token(old, new).cpu(), short_sites(list(old.sites))[0]
    before, after = old.ids.cpu(), new.ids.cpu()
    left = MOST_TOKENS
    paragraphs = []
    for row in range(ids.shape[0]):
        places = shown[row].nonzero()[:left, 0].tolist()
        left -= len(places)
        spans = [
            _span(before[row, t], after[row, t], names, int(flips[row, t]), tokenizer.decode([int(ids[row, t])]))
            for t in places
        ]
        if spans:
            paragraphs.append(f'<p style="{_TEXT}">{"".join(spans)}</p>')
    missing = int(shown.sum()) - (MOST_TOKENS - left)
    if missing:
        paragraphs.append(f"<p>{missing:,} more tokens are not shown.</p>")
    return TokenChanges(f"<div>{_LEGEND}{''.join(paragraphs)}</div>")


_TEXT = "font-family: monospace; white-space: pre-wrap; line-height: 1.7"
_LEGEND = (
    '<p style="font-size: smaller">Colour: share of the routing sites whose set of experts changed, from none to '
    '<span style="background: rgba(213,94,0,0.85); color: #fff">all</span>.</p>'
)


def _span(old: Tensor, new: Tensor, names: list[str], flips: int, text: str) -> str:
    """Return the HTML of one token. old, new: its expert ids `[L,K]`. flips: how many of its sites changed."""
    lines = [f"{flips} of {len(names)} sites changed"]
    for name, before, after in zip(names, old.tolist(), new.tolist(), strict=True):
        gone, come = sorted(set(before) - set(after)), sorted(set(after) - set(before))
        if gone and -1 not in (*gone, *come):
            lines.append(f"{name}: {', '.join(map(str, gone))} → {', '.join(map(str, come))}")
    share = flips / len(names)
    ink = "color: #fff; " if share > 0.6 else ""
    colour = f"{ink}background: rgba(213,94,0,{0.85 * share:.2f})" if flips else ""
    return f'<span title="{escape(chr(10).join(lines))}" style="{colour}">{escape(text)}</span>'


@contextmanager
def _axes(ax: Axes | None) -> Iterator[Axes]:
    """Context manager: give `ax` itself, or if None the axes of a new figure in the house style."""
    if ax is not None:
        yield ax
        return
    import matplotlib.pyplot as plt

    with house_style({"figure.dpi": 110}):  # a notebook shows one pixel per dot
        yield plt.subplots()[1]
