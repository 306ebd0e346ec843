"""Launchers, which make the runs of a study: their protocol, and the launcher that uses processes of this machine."""

from collections.abc import Sequence
from typing import Protocol

import torch

from moe_rl.done import NAME
from moe_rl.processes import usable_cores
from moe_rl.rollout.vllm_engine import vllm_url
from moe_rl.study.config import ConfigError, StudyConfig
from moe_rl.study.run import check_here
from moe_rl.study.runs import Run, last_line
from moe_rl.study.worker import Worker


class NotTakenError(RuntimeError):
    """Error for a run that cannot be started now, and may be later; the message says why."""


class Launcher(Protocol):
    """Protocol of launchers, which make many runs at a time somewhere; each run folder says how far its run is."""

    def check(self, run: Run) -> None:
        """Raise ConfigError, or what `moe_rl.study.run.check_here` raises, for a run that this launcher cannot make."""

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        """Begin `moe-rl ARGUMENTS`, the command of `run`; its output goes to `run.log`.

        Raises NotTakenError, or ConfigError if trying again cannot start this run.
        """

    def ended(self, run: Run) -> bool | None:
        """Return whether the run finished; False if it ended unfinished, None while it goes on.

        Sets `run.note` and `run.problem`.
        """

    def leave(self) -> None:
        """Let go of all runs, because the study goes no further: end them, or leave jobs of Slurm alone."""


class Processes:
    """Launcher that makes runs as processes of this machine, one thread each, which end with the study.

    One worker for each kind of CPU kernels starts the processes.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.worker_of: dict[str, Worker] = {}

    def check(self, run: Run) -> None:
        check_here(run.config)
        distributed = run.config.distributed
        if distributed.strategy != "none":
            raise ConfigError(
                f"moe-rl study starts one process for each run here; a run over several (distributed.strategy) is "
                f"started by itself: torchrun --nproc_per_node {distributed.processes or 'N'} -m moe_rl run FILE --arm "
                f"{run.arm} --seed {run.seed} --distributed.strategy {distributed.strategy} --output {run.folder}. As "
                "jobs of a cluster a study starts them all: --launcher slurm"
            )

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        for rounding, other in list(self.workers.items()):
            if rounding != run.rounding and other not in self.worker_of.values():
                self.workers.pop(rounding).stop()
        worker = self.workers.get(run.rounding)
        if worker is None or not worker.alive():
            worker = self.workers[run.rounding] = Worker(run.rounding, run.log.with_name("worker.log"))
        self.worker_of[str(run.folder)] = worker
        worker.begin(arguments, run.log)

    def ended(self, run: Run) -> bool | None:
        worker = self.worker_of[str(run.folder)]
        status = worker.ended(run.log)
        if status is None:
            return None
        del self.worker_of[str(run.folder)]
        if status and not worker.alive():
            run.problem = f"the process that started it ended with status {status}: {last_line(worker.log)}"
        done = (run.folder / NAME).exists()
        if status == 0 and not done:  # code of the user's own that calls sys.exit
            run.problem = "its process ended with status 0 before the run was done"
        return done and status == 0

    def leave(self) -> None:
        for worker in {*self.workers.values(), *self.worker_of.values()}:
            worker.stop()


def check_roundings(names: Sequence[str], native: str) -> None:
    """Raise ConfigError for a name that is neither `native` nor a smaller instruction set, which this processor has.

    Torch would use any other instruction set that it is told to, and die of an illegal instruction.

    native: the instruction set that torch uses by itself.
    """
    smaller = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}.get(native, ())
    for name in names:
        if name not in ("native", *smaller):
            raise ConfigError(
                f"rounding {name!r}: torch uses {native} kernels here, so that {', '.join(('native', *smaller))} "
                f"{'is' if not smaller else 'are'} what can be compared"
            )


def workers_of(study: StudyConfig, launcher: str, repeats: int) -> int:
    """Return how many runs are made at a time: one per core, with one thread each, or as jobs all of them.

    It is one without jobs if there is a GPU, and always if a run has the vLLM of another machine, which is lent to one
    run at a time.
    """
    engines = [study.resolve(arm, study.seeds[0]).rollout.engine for arm in study.arms]
    if any(engine.kind == "vllm" and vllm_url(engine) for engine in engines):
        return 1
    if launcher != "processes":
        return len(study.runs()) * repeats
    return 1 if torch.cuda.is_available() else usable_cores()
