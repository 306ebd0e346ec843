"""The catalogue against what runs write, in both directions, and against its page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from micro import judged
from test_methods import MICRO, config_of

from moe_rl.measure.catalogue import CATALOGUE, HEADS, find, render
from moe_rl.rollout.engines import EngineConfig
from moe_rl.training import MethodConfig, ProbeConfig, begin, run, setup

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
ONE = replace(MICRO.optim, steps=1)
RUNS = {
    "whole": replace(
        MICRO, optim=ONE, probe=ProbeConfig(sequences=4, tokens_every=1, decompose_every=1), checkpoint_every=9
    ),
    "ppo": config_of("ppo", optim=ONE),
    "iterative": config_of("iterative_grpo", optim=replace(ONE, reference_reset_every=1)),
    "dapo": config_of("dapo", optim=ONE, rollout=replace(MICRO.rollout, dynamic_sampling=1, overlong_buffer=2)),
    "partial": config_of("grpo", optim=ONE, rollout=replace(MICRO.rollout, segment=3)),
    "rspo": config_of("rspo_replay", optim=ONE),
    "gradients": replace(MICRO, optim=ONE, probe=ProbeConfig(sequences=4, tokens_every=0, floor=False, gradients=True)),
    "corrected": config_of("minirl", optim=ONE),
    "process": config_of("gspo_token_process", optim=ONE),
    "decoupled": config_of("grpo_decoupled", optim=ONE),
    "accepted": config_of("rft", optim=ONE),
    "dpo": config_of("dpo", optim=ONE),
    "overflow": replace(MICRO, optim=replace(ONE, on_nonfinite="skip", aux_loss_coef=1e38)),
    "predicted": replace(MICRO, optim=ONE, method=MethodConfig(replay="PR2"), probe=ProbeConfig(every=0)),
    "engine": replace(
        MICRO,
        optim=ONE,
        method=MethodConfig(replay="R3"),
        rollout=replace(MICRO.rollout, engine=EngineConfig(kind="hf", router_format="int4")),
        probe=ProbeConfig(sequences=4, tokens_every=0, floor=False),
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By run and kind: the names that were written."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_task", judged(setup.make_task))
        for name, config in RUNS.items():
            folder = tmp_path_factory.mktemp(name)
            run(begin(config, folder))
            names = found[name] = {}
            for line in (folder / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                kind = row.pop("kind")
                names.setdefault(kind, set()).update(row)
                for key, value in row.items():
                    if value is not None and (metric := find(kind, key)):
                        assert isinstance(value, list) == metric.is_list, f"{kind}.{key}"
            for file in (folder / "tokens").glob("*.parquet"):
                names.setdefault("tokens", {"step"}).update(pq.read_schema(file).names)
    return found


def test_every_name_that_runs_write_is_defined(written):
    unknown = {
        (kind, name)
        for kinds in written.values()
        for kind, names in kinds.items()
        for name in names - {"step"}
        if find(kind, name) is None
    }
    assert not unknown


def test_every_definition_is_of_a_name_that_runs_write(written):
    seen = {(kind, find(kind, name)) for kinds in written.values() for kind, names in kinds.items() for name in names}
    missing = {(kind, m.name) for kind, metrics in CATALOGUE.items() for m in metrics if (kind, m) not in seen}
    assert missing == {("step", "peak_bytes")}, "only a GPU reports its peak"


def test_what_has_no_condition_is_always_written(written):
    whole = written["whole"]
    for kind in set(CATALOGUE) - {"engine"}:
        always = {m.name for m in CATALOGUE[kind] if not m.when}
        assert always <= whole[kind]
    assert {m.name for m in CATALOGUE["engine"] if not m.when} <= written["engine"]["engine"]


def test_a_name_has_one_entry_and_an_exact_one_comes_first():
    for metrics in CATALOGUE.values():
        assert len({m.name for m in metrics}) == len(metrics)
    assert find("rollout", "reward_std").unit == "reward"
    assert find("rollout", "reward_odd").name == "reward_<name>"
    assert find("rollout", "nothing") is None
    assert set(HEADS) == set(CATALOGUE)


def test_the_page_is_the_registry():
    assert PAGE.read_text() == render(), "python -m moe_rl.measure.catalogue > docs/metrics.md"
    rows = [line for line in render().splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows), "six cells each"
