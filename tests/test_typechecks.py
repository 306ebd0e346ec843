"""Calls are checked in tests: arguments, results and axes that share a name, however often a function is defined."""

import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError, jaxtyped
from torch import Tensor
from typechecks import checked

from moe_rl.objectives import group_advantages


def defined(answer):
    @jaxtyped(typechecker=checked)
    def same_shape(x: Float[Tensor, "B T"], words: list[str] | None = None) -> Float[Tensor, "B T"]:
        return answer

    return same_shape


def test_every_definition_of_a_function_is_checked():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    for _ in range(2):
        good, longer = defined(two), defined(three)
        assert good(two) is two and longer(three, words=["a"]) is three
        for function, x in ((good, three), (longer, two)):
            with pytest.raises(TypeCheckError, match="return value"):
                function(x)
        for arguments in ((two.long(),), (two[None],), (two, [1])):
            with pytest.raises(TypeCheckError, match="parameters"):
                good(*arguments)


def test_definitions_with_other_annotations_share_nothing():
    def made(hint):
        @jaxtyped(typechecker=checked)
        def takes(x: hint) -> hint:
            return x

        return takes

    whole, half = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    ints, floats = Int[Tensor, " n"], Float[Tensor, " n"]
    for hint, good, bad in (
        (ints, whole, half),
        (floats, half, whole),
        (ints, whole, half),
        (list[ints], [whole], whole),
    ):
        assert made(hint)(good) is good
        with pytest.raises(TypeCheckError):
            made(hint)(bad)


def test_what_names_no_array_is_left_as_it_is():
    def plain(x: int, names: list[str] | None = None) -> "int":
        return x

    def quoted(x: "Float[Tensor, ' n']") -> None: ...

    def inside(x: dict[str, list[Float[Tensor, " n"]] | None]) -> None: ...

    assert jaxtyped(plain, typechecker=checked) is plain
    for function in (quoted, inside):
        assert jaxtyped(function, typechecker=checked).__wrapped__ is function


def test_the_package_is_checked():
    with pytest.raises(TypeCheckError, match="rewards"):
        group_advantages(torch.zeros(2, 2), 2)
