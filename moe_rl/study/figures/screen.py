"""Figures on HTML pages, which may be dark: a figure as an <svg> element, and the colours of pages."""

import colorsys
import re
from html import escape

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

from moe_rl.study.figures.saving import StudyFigure

ON_LIGHT_CELL, ON_DARK_CELL = "#101113", "#fdfeff"
"""Ink on the cells of a heat map, whose colours are the same on a dark screen; these inks are used for nothing else."""
PAPER = "#15181c"  # background of a dark page
DARK = {"#ffffff": PAPER, "#1a1a1a": "#e9e7e2", "#6b6b6b": "#a9aaab", "#e6e6e6": "#2f353b"}
"""Colours of paper, ink, axes and grid in figures -> their colours on a dark page."""
WIDER = 1.35  # most times its width on paper that a figure is wide on a page with room


def inline_svg(figure: StudyFigure) -> str:
    """Return the figure as an <svg> element: ids made unique, no prologue or metadata, labelled for screen readers, as
    wide as the page allows up to `WIDER`. A style of its own changes its colours on a dark page."""
    svg = figure.render("svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    prefix = f"{figure.name}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", svg)
    width = WIDER * float(re.search(r'<svg[^>]*? width="([\d.]+)pt"', svg)[1])  # type: ignore[index]  # always there
    style = rf'\1 style="max-width:{width:g}pt"'
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"', style, svg, count=1)
    used: dict[str, str] = {}

    def variable(match: re.Match[str]) -> str:
        colour = match[2].lower()
        if colour in (ON_LIGHT_CELL, ON_DARK_CELL):
            return match[0]
        used[colour] = DARK.get(colour) or on_dark(colour, 4.0)
        return f"{match[1]}var(--c{colour[1:]}, {colour})"

    svg = re.sub(r"((?:fill|stroke): )(#[0-9a-fA-F]{6})\b", variable, svg)
    dark = "".join(f"--c{colour[1:]}:{other};" for colour, other in sorted(used.items()))
    style = f"<style>@media (prefers-color-scheme:dark){{#{prefix}svg{{{dark}}}}}</style>"
    head = f'<svg id="{prefix}svg" role="img" aria-label="{escape(figure.title)}"'
    svg = svg.replace("<svg", head, 1)
    return svg.replace(">", f">{style}", 1)


def scales() -> dict[str, dict[str, list[str]]]:
    """Return the colours of light and dark pages: `sequence` (from nothing to all, the figures' Blues) and `diverging`
    (fell, same, rose)."""
    blues, purples = mpl.colormaps["Blues"], mpl.colormaps["PuOr"]
    dark = LinearSegmentedColormap.from_list("dark", ["#1d2127", "#15406f", "#2f78b8", "#7db4df", "#cfe6fa"])
    split = LinearSegmentedColormap.from_list("split", ["#ffb45e", "#8a5417", "#1d2127", "#5b4a94", "#c3b4ff"])
    nine, steps = np.linspace(0, 1, 9), np.linspace(0.08, 0.92, 9)
    return {
        "light": {
            "sequence": ["#ffffff", *(to_hex(blues(x)) for x in np.linspace(0.18, 1, 8))],
            "diverging": [to_hex(purples(x)) if i != 4 else "#ffffff" for i, x in enumerate(steps)],
        },
        "dark": {"sequence": [to_hex(dark(x)) for x in nine], "diverging": [to_hex(split(x)) for x in nine]},
    }


def on_dark(colour: str, contrast: float = 4.5) -> str:
    """Return the colour, made lighter until it stands out from a dark background (WCAG contrast ratio), with the hue
    kept.

    >>> on_dark("#E69F00"), on_dark("#0B4A8F")
    ('#e69f00', '#1d80ee')
    """
    hue, light, saturation = colorsys.rgb_to_hls(*to_rgb(colour))
    while light < 1:
        rgb = colorsys.hls_to_rgb(hue, light, saturation)
        if (_luminance(rgb) + 0.05) / (_luminance(to_rgb(PAPER)) + 0.05) >= contrast:
            break
        light = min(1.0, light + 0.01)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation))


def _luminance(rgb: tuple[float, float, float]) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
