"""What numbers and names a setting may have, said once for the check and for its message."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers; `whole` allows integers only, `open_low` and `open_high` exclude an end.

    >>> POSITIVE.refusal("learning_rate", -1.0)
    'learning_rate: expected a finite number above 0, got -1.0'
    >>> Range(0, 1, open_high=True).refusal("gamma", 0.5) is None
    True
    """

    low: float | int
    high: float | int = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def refusal(self, name: str, value: Any) -> str | None:
        """Why `value` is not in the interval, with the setting's name; None if it is."""
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        if number and math.isfinite(value):
            above = value > self.low if self.open_low else value >= self.low
            below = value < self.high if self.open_high else value <= self.high
            if above and below:
                return None
        return f"{name}: expected {self}, got {value!r}"

    def __str__(self) -> str:
        ends = []
        if math.isfinite(self.low):
            ends.append(f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}")
        if math.isfinite(self.high):
            ends.append(f"below {self.high:g}" if self.open_high else f"of at most {self.high:g}")
        kind = "a whole number" if self.whole else "a finite number"
        return " ".join([kind, " and ".join(ends)]).rstrip()


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
COUNT = Range(1, whole=True)
COUNT_OR_NONE = Range(0, whole=True)


def unknown(name: str, value: object, allowed: Iterable[str]) -> str:
    """The message for a name that is none of `allowed`: the setting, what there is, what came, the nearest.

    >>> unknown("value.model", "heads", ("separate", "head"))
    "value.model: expected one of separate, head; got 'heads'. Did you mean 'head'?"
    """
    allowed = list(allowed)
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{name}: expected one of {', '.join(allowed)}; got {value!r}.{hint}"
