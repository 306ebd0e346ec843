"""The decorator `no_type_check`, for code that torch.compile traces through."""

from typing import TypeVar

Definition = TypeVar("Definition")


def no_type_check(definition: Definition) -> Definition:
    """Keep jaxtyping's import hook (which looks for this name) from wrapping a function or class.

    Tests check shapes at run time by such wrappers; Dynamo cannot trace them. Unlike `typing.no_type_check` it leaves
    static checking on.
    """
    return definition
