"""Who makes the runs of a study: what a launcher does, and the one that uses processes of this machine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from moe_rl.processes import usable_cores
from moe_rl.rollout.vllm_place import vllm_url
from moe_rl.study.config import StudyConfig
from moe_rl.study.runs import Run
from moe_rl.study.worker import Worker


@runtime_checkable
class Launcher(Protocol):
    """Makes runs somewhere, many at a time. How far each is, its run folder says."""

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        """Begin `moe-rl ARGUMENTS`, which is `run`; what it prints goes to `run.log`."""

    def ended(self, run: Run) -> bool | None:
        """Whether it finished; None while it goes on. Sets `run.note` and `run.problem`."""

    def leave(self) -> None:
        """The study goes no further."""


class Processes:
    """Processes of this machine, one thread each; they end with the study. A worker that is free makes the next run."""

    def __init__(self) -> None:
        self.busy: dict[str, Worker] = {}
        self.idle: list[Worker] = []

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        self.busy[str(run.folder)] = worker = self._worker(run)
        worker.begin(arguments, run.log)

    def ended(self, run: Run) -> bool | None:
        status = self.busy[str(run.folder)].ended()
        if status is not None:
            self.idle.append(self.busy.pop(str(run.folder)))
        return None if status is None else status == 0

    def leave(self) -> None:
        for worker in [*self.idle, *self.busy.values()]:
            worker.stop()

    def _worker(self, run: Run) -> Worker:
        """An idle worker with the run's kernels, or a new one; the other idle ones are ended."""
        found = None
        while self.idle:
            worker = self.idle.pop()
            if found is None and worker.rounding == run.rounding and worker.alive():
                found = worker
            else:
                worker.stop()
        return found or Worker(run.rounding, run.log)


def workers_of(study: StudyConfig, launcher: str, repeats: int) -> int:
    """Runs at a time: one per core, one thread each; one in all where there is a GPU, or where a run has the vLLM of
    another machine, which it lends to one at a time; all of them as jobs."""
    engines = [study.resolve(arm, study.seeds[0]).rollout.engine for arm in study.arms]
    if any(engine.kind == "vllm" and vllm_url(engine) for engine in engines):
        return 1
    if launcher != "processes":
        return len(study.runs()) * repeats
    return 1 if torch.cuda.is_available() else usable_cores()
