"""Sweeps: tests that are repeated for every model family, study or setting of a kind.

`make test` runs such a test for the few values that differ most from each other, `make test-all` for all values: the
others have the marker `sweep`.
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
"""Model classes: one for each kind of router and of layer."""


def mostly_swept(values: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """Return `values` as parameters of a test; those that are not among `few` get the marker `sweep`."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.sweep) for value in values]


def sweep(*values: Any) -> Any:
    """Return a parameter set with the marker `sweep`."""
    return pytest.param(*values, marks=pytest.mark.sweep)
