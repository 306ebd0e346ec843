"""One comparison over several studies: the committed pairs, one after the other."""

import runpy
from pathlib import Path

import pytest


def test_pairs_of_studies_are_joined_and_what_no_study_declared_is_refused():
    differences = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "pooled.py"))["differences"]
    stale = differences("methods_stale:gspo_partial:grpo_partial")
    assert len(stale) == 9 and min(stale) > 0
    with pytest.raises(ValueError, match="not compared there; methods_stale has methods_stale:grpo_partial:grpo"):
        differences("methods_stale:grpo:gspo")
    with pytest.raises(ValueError, match="expected STUDY:ARM:OTHER"):
        differences("no_such_study:a:b")
