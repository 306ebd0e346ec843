"""Allowed ranges and names of settings, declared in the types of dataclass fields, and the checks against them."""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from moe_rl.names import closest


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
        """Return a message that the setting `name` has a `value` outside the interval; None if it is inside."""
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        try:
            finite = number and math.isfinite(value)
        except OverflowError:
            return f"{name}: expected {self}, got one of {value.bit_length()} bits, which is larger than any float"
        if finite:
            above = value > self.low if self.open_low else value >= self.low
            below = value < self.high if self.open_high else value <= self.high
            if above and below:
                return None
        return f"{name}: expected {self}, got {value!r}"

    def __str__(self) -> str:
        ends = []
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        if math.isfinite(self.low):
            ends.append(f"above {low}" if self.open_low else f"of at least {low}")
        if math.isfinite(self.high):
            ends.append(f"below {high}" if self.open_high else f"of at most {high}")
        kind = "a whole number" if self.whole else "a finite number"
        return " ".join([kind, " and ".join(ends)]).rstrip()


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
DECAY = Range(1e-4)  # below, e^(decay (1 - r)) does not bound a power of a ratio of e^60
FRACTION = Range(0, 1)
COUNT = Range(1, whole=True)
COUNT_OR_NONE = Range(0, whole=True)
SEED = Range(0, 2**63 - 1, whole=True)

Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Decay = Annotated[float, DECAY]
Fraction = Annotated[float, FRACTION]
BelowOne = Annotated[float, Range(0, 1, open_high=True)]
Count = Annotated[int, COUNT]
Whole = Annotated[int, COUNT_OR_NONE]
Seed = Annotated[int, SEED]


def unknown(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return the error message for a name that is not in `allowed`.

    The message gives the setting, the allowed names, the given name and the most similar allowed one, if any is close.

    >>> unknown("value.model", "heads", ("separate", "head"))
    "value.model: expected one of separate, head; got 'heads'. Did you mean 'head'?"
    """
    allowed = list(allowed)
    near = closest(str(value), allowed)
    hint = "" if near is None else f" Did you mean {near!r}?"
    return f"{name}: expected one of {', '.join(allowed)}; got {value!r}.{hint}"


def check_settings(settings: Any, prefix: str = "", error: type[ValueError] = ValueError) -> None:
    """Raise `error` for the first setting with a value that its type does not allow.

    A setting is a field of (nested) dataclasses. A `Literal` type allows its names, a type annotated with a `Range` the
    numbers in it, `float` also an int, a tuple also a list; any other type its instances. Only bool allows a bool. The
    message gives the field, after `prefix`, what it may be and its value."""
    for name, hint, value in typed_settings(settings, prefix):
        if refused := _refusal(name, hint, value):
            raise error(refused)


def typed_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, type and value of every setting of nested dataclasses."""
    for name, hint in field_types(settings.__class__).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value):
            yield from typed_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint, value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by name, including `Annotated` ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _refusal(name: str, hint: Any, value: Any) -> str | None:
    """Return a message that the type `hint` does not allow `value`; None if it does."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1].refusal(name, value)
    if origin is Literal:
        return None if value in args else unknown(name, value, args)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        refusals = [_refusal(name, option, value) for option in args if option is not type(None)]
        return refusals[0] if all(refusals) else None
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return f"{name}: expected a tuple, got {value!r}"
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(kinds) != len(value):
            return f"{name}: expected {len(kinds)} values, got {len(value)}"
        return next(filter(None, (_refusal(name, kind, item) for kind, item in zip(kinds, value, strict=True))), None)
    kind = origin or hint
    fits = kind is Any or isinstance(value, int | float if kind is float else kind)
    if fits and (kind in (Any, bool) or not isinstance(value, bool)):
        return None
    return f"{name}: expected {kind.__name__}, got {value!r}"
