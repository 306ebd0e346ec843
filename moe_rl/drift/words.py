"""Numbers in sentences and tables."""

import math


def number(value: float | None) -> str:
    """Three digits; without an exponent where that stays short."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}".replace("-", "−")


def percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.3g} %".replace("-", "−")
