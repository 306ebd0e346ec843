"""Type checks of calls in tests, by jaxtyping and beartype: functions with arrays only, and each stub made once."""

from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype

_made: dict[Any, Callable[..., Any]] = {}
_jaxtyped = jaxtyping.jaxtyped


def check_arrays_only() -> None:
    """Make jaxtyping's import hook leave functions and classes without a shaped annotation unchanged.

    The hook wraps every function of a package, which took up to half of a test's time; mypy checks all other types.
    """
    jaxtyping.jaxtyped = _if_shaped


def _if_shaped(code: Any = None, **how: Any) -> Any:
    """Decorate by jaxtyping if an annotation names an array; else return the function or class unchanged."""
    if code is None:  # called with options alone: return a decorator
        return lambda code: _if_shaped(code, **how)
    function = code.fget if isinstance(code, property) else getattr(code, "__func__", code)  # class and static methods
    shaped = any(_names_arrays(hint) for hint in getattr(function, "__annotations__", {}).values())
    return _jaxtyped(code, **how) if shaped else code


def _names_arrays(hint: Any) -> bool:
    """Return whether a type hint, or a part of it, is an array type."""
    if isinstance(hint, str):
        return "Tensor" in hint or "Array" in hint
    is_array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(_names_arrays(part) for part in get_args(hint) if part is not hint)


def checked(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Return `beartype(stub)`, the same one for all stubs with equal annotations.

    jaxtyping checks a call by two stubs, functions that have the annotations of the real one and no content: the first
    gets the arguments, the second the arguments again and the result. It makes both whenever a function is defined,
    which for an inner function is every call of the outer one; beartype then takes longer than what most of these
    functions do. So stubs with the same annotations share one, and the second stub checks only the result.
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
