"""How jaxtyping checks calls in tests: what takes or returns arrays, by beartype; no stub is made or asked twice."""

from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype

_made: dict[Any, Callable[..., Any]] = {}
_jaxtyped = jaxtyping.jaxtyped


def check_arrays_only() -> None:
    """jaxtyping's import hook then leaves functions and classes without a shaped annotation as they are.

    It wraps each of a package; that was up to half of the time of a test, and what is no array mypy checks.
    """
    jaxtyping.jaxtyped = _if_shaped


def _if_shaped(code: Any = None, **how: Any) -> Any:
    if code is None:  # as a decorator
        return lambda code: _if_shaped(code, **how)
    function = code.fget if isinstance(code, property) else getattr(code, "__func__", code)  # class and static methods
    shaped = any(_names_arrays(hint) for hint in getattr(function, "__annotations__", {}).values())
    return _jaxtyped(code, **how) if shaped else code


def _names_arrays(hint: Any) -> bool:
    if isinstance(hint, str):
        return "Tensor" in hint or "Array" in hint
    is_array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(_names_arrays(part) for part in get_args(hint) if part is not hint)


def checked(stub: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(stub)`.

    jaxtyping checks a call by two functions that have the annotations of the real one and no content: the first sees
    the arguments, the second the arguments again and the result. It makes both whenever a function is defined, which
    functions within functions are at every call of the outer one; beartype then takes longer than what most of them do.
    So stubs with the same annotations share one, and the second has only the result to check.
    """
    hints = stub.__annotations__
    if hints.get("return", Any) is not Any:
        stub.__annotations__ = hints = {"return": hints["return"]}
    code = stub.__code__
    takes = code.co_varnames, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    optional = len(stub.__defaults__ or ()), tuple(stub.__kwdefaults__ or ())
    key = stub.__module__, stub.__qualname__, takes, optional, tuple(hints.items())
    try:
        return _made[key]
    except KeyError:
        return _made.setdefault(key, beartype(stub))
    except TypeError:  # an annotation that cannot be hashed
        return beartype(stub)
