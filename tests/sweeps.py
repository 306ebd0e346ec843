"""Sweeps: one test for every family, study or setting of a kind.

`make test` runs it for a few that differ most from each other, `make test-all` for all (marker `sweep`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

FAMILIES = (
    "AfmoeForCausalLM",
    "DbrxForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JetMoeForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "MiniMaxM2ForCausalLM",
    "NemotronHForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "ZayaForCausalLM",
)
"""One of each kind of router and of layer."""


def mostly_swept(values: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """`values` as parameters of a test; those that are not among `few` are of the sweep."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.sweep) for value in values]


def sweep(*values: Any) -> Any:
    """A parameter set that is of the sweep."""
    return pytest.param(*values, marks=pytest.mark.sweep)
