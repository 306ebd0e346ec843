"""How jaxtyping checks calls in tests: beartype, and no stub is made or asked twice."""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_made: dict[Any, Callable[..., Any]] = {}


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
