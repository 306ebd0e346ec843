"""Trackers through accelerate: off by default, named when missing, told what metrics.jsonl is told."""

import json
from dataclasses import replace

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from micro import MICRO

from moe_rl.rollout.engine import ModelEngine
from moe_rl.training import trackers, train
from moe_rl.training.trackers import TrackerError

TWO = replace(MICRO, optim=replace(MICRO.optim, steps=2))


class Fake(GeneralTracker):
    """In the place of trackio's, in accelerate's own table."""

    name = "trackio"
    requires_logging_directory = False
    runs: list = []  # noqa: RUF012

    def __init__(self, project, **options):
        super().__init__()
        self.project, self.options, self.logged, self.finished = project, options, [], False
        Fake.runs.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **_):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Fake)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType.TRACKIO])
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "trackio")
    monkeypatch.setattr(Fake, "runs", [])
    return Fake


def test_a_tracker_is_told_every_number_of_the_metrics_and_the_listener_still_is(fake, tmp_path):
    heard = []
    folder = tmp_path / "study" / "grpo" / "seed0"
    train(replace(TWO, tracker="trackio"), folder, listener=heard.append)
    (run,) = fake.runs
    assert run.project == "moe_rl" and run.options["name"] == "study/grpo/seed0" and run.finished
    assert run.config["optim.num_minibatches"] == 2 and run.config["method.objective"] == "grpo"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert heard[0]["kind"] == "policy" and heard[1:] == rows, "where it starts from is told and is in no metrics"
    assert len(run.logged) == len(rows)
    steps = [step for step, _ in run.logged]
    assert steps == sorted(steps) and steps[-1] == 4, "trackers refuse to go back; two updates a step"
    losses = [values["update/loss"] for _, values in run.logged if "update/loss" in values]
    assert losses == [row["loss"] for row in rows if row["kind"] == "update"]


def test_a_tracker_is_told_of_the_end_when_a_run_fails(fake, tmp_path):
    def stop(row):
        if row["kind"] == "eval":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(TWO, tracker="trackio"), tmp_path, listener=stop)
    assert fake.runs[0].finished


def test_a_tracker_that_fails_at_the_end_leaves_no_rollout_engine_open(fake, monkeypatch, tmp_path):
    def fail(self):
        raise ConnectionError("the tracker's server is gone")

    closed = []
    monkeypatch.setattr(Fake, "finish", fail)
    monkeypatch.setattr(ModelEngine, "close", lambda self: closed.append(self))
    with pytest.raises(ConnectionError, match="server is gone"):
        train(replace(TWO, optim=replace(TWO.optim, steps=1), tracker="trackio"), tmp_path)
    assert len(closed) == 1


def test_off_by_default(fake, tmp_path):
    train(replace(TWO, optim=replace(TWO.optim, steps=1)), tmp_path)
    assert fake.runs == [] and not (tmp_path / "tracker").exists()


@pytest.mark.parametrize(
    "name, hint",
    [("trackio", r"'.\[trackers\]'"), ("wandb", "install wandb"), ("tensorboard", "install tensorboard")],
)
def test_a_missing_package_is_named_before_anything_is_written(monkeypatch, tmp_path, name, hint):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(TrackerError, match=f"{name} is not installed.*{hint}"):
        train(replace(TWO, tracker=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_accelerate_drops_is_an_error(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(TrackerError, match="accelerate does not offer trackio"):
        train(replace(TWO, tracker="trackio"), tmp_path / "run")
