"""Runs as jobs of a cluster, through submitit: the same run folders, watched from where the study was started.

submitit hands a job its arguments (strings and numbers) in a pickle of its own under `logs/jobs`; none is read here.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_rl.done import NAME
from moe_rl.files import write_json
from moe_rl.study.config import ConfigError
from moe_rl.study.job import run_job
from moe_rl.study.runs import Run, last_line

CLUSTERS = {"slurm": "slurm", "submitit-local": "local"}
"""`--launcher`, and submitit's name of it."""
DEFAULTS: dict[str, Any] = {"timeout_min": 720}
SHARED = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "stderr_to_stdout")
"""Options that every cluster of submitit has; the others are Slurm's."""
OURS = ("name", "job_name", "tasks_per_node", "ntasks_per_node", "array_parallelism")
GOING_ON = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED")
PATIENCE = 15.0  # seconds in which what a node wrote last is seen here, over a network


def job_options(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as submitit's parameters: those of sbatch with `slurm_` before them, numbers as numbers.

    Raises:
        ConfigError: no `key=value`, or an option that is decided here.
    """
    options = dict(DEFAULTS)
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-").replace("-", "_").removeprefix("slurm_")
        if not equals or not key or not value:
            raise ConfigError(f"--launcher-options {word!r}: expected KEY=VALUE, e.g. partition=gpu timeout_min=600")
        if key in OURS:
            raise ConfigError(
                f"--launcher-options {word!r}: a job is one run, named after it, with one task on each node, which "
                "starts the processes that distributed.processes asks for; --workers says how many jobs at a time"
            )
        options[key if key in SHARED else f"slurm_{key}"] = _value(value)
    return options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return int(text)
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else text


class Jobs:
    """A launcher whose runs are jobs.

    A study that is stopped leaves Slurm's jobs alone; started again it finds those that go on (`ARM_seedN.job` beside
    the log holds the job's number) and watches them. Jobs of submitit's local executor end with it.

    Args:
        cluster: `slurm`; or `submitit-local`, the same jobs as processes of this machine, to try them.
        study, output: name and folder of the study.
        options: what `job_options` made.

    Raises:
        ConfigError: submitit or Slurm is missing here, or an option that submitit does not know.
    """

    def __init__(self, cluster: str, study: str, output: Path, options: Mapping[str, Any]):
        self.cluster, self.study, self.options = CLUSTERS[cluster], study, dict(options)
        check_submitit(self.cluster)
        import submitit

        self.folder = output / "logs" / "jobs"
        try:
            self.executor = submitit.AutoExecutor(self.folder, cluster=self.cluster)
            self.executor.update_parameters(**self.options)
        except (NameError, AssertionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--launcher-options: {error}") from error
        self.jobs: dict[Path, Any] = {}
        self.over: dict[Path, float] = {}
        self.patience = PATIENCE if self.cluster == "slurm" else 0.0

    @property
    def nodes(self) -> int:
        return int(self.options.get("nodes", 1))

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        job = self._going_on(run) or self._submit(run, arguments)
        self.jobs[run.folder] = job
        run.problem, run.note = "", f"job {job.job_id} waits"

    def _submit(self, run: Run, arguments: Sequence[object]) -> Any:
        distributed = run.config.distributed
        processes = None if distributed.strategy == "none" else distributed.processes
        settings = {} if run.rounding == "native" else {"ATEN_CPU_CAPABILITY": run.rounding}
        self.executor.update_parameters(name=f"{self.study}_{run.arm}_seed{run.seed}")
        words = [str(argument) for argument in arguments]
        try:
            job = self.executor.submit(run_job, words, str(run.log), processes, settings)
        except Exception as error:  # submitit's, of what sbatch said
            raise ConfigError(f"{run.name}: the job was not taken: {str(error).strip()}") from error
        write_json(_record(run), {"cluster": self.cluster, "job": job.job_id})
        return job

    def _going_on(self, run: Run) -> Any | None:
        """The job that an earlier start of the study left with this run, if it has not ended."""
        try:
            record = json.loads(_record(run).read_text())
            cluster, number = record["cluster"], str(record["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not cluster == self.cluster == "slurm":
            return None
        import submitit

        job: Any = submitit.SlurmJob(folder=self.folder, job_id=number, tasks=list(range(self.nodes)))
        return job if _state(job, force=True) in GOING_ON else None

    def ended(self, run: Run) -> bool | None:
        if (run.folder / NAME).exists():
            return self._forget(run, True)
        job = self.jobs[run.folder]
        if not job.done():
            state = _state(job)
            run.note = "" if state == "RUNNING" else f"job {job.job_id} {state.lower()}"
            return None
        now = time.monotonic()
        if now - self.over.setdefault(run.folder, now) < self.patience:
            return None
        said = last_line(run.log) if run.log.exists() else f"nothing was printed; see {job.task(0).paths.stderr}"
        run.problem = f"job {job.job_id} ended ({_state(job)}) before the run was done: {said}"
        return self._forget(run, False)

    def _forget(self, run: Run, finished: bool) -> bool:
        run.note = ""
        del self.jobs[run.folder]
        self.over.pop(run.folder, None)
        _record(run).unlink(missing_ok=True)
        return finished

    def leave(self) -> None:
        if self.jobs and self.cluster == "slurm":
            numbers = " ".join(job.job_id for job in self.jobs.values())
            print(f"{len(self.jobs)} jobs go on, and the same command watches them; scancel {numbers}", file=sys.stderr)
        elif self.jobs:
            for job in self.jobs.values():
                job.cancel()


def check_submitit(cluster: str) -> None:
    """Raises ConfigError where jobs cannot be started, and says what is missing."""
    if find_spec("submitit") is None:
        raise ConfigError(
            "--launcher needs submitit, which is not installed: pip install '.[slurm]' in the checkout of moe_rl"
        )
    missing = [name for name in ("sbatch", "srun", "sacct") if shutil.which(name) is None]
    if cluster == "slurm" and missing:
        raise ConfigError(
            f"--launcher slurm: no {', '.join(missing)} on this machine. Start the study where jobs are submitted (a "
            "login node of the cluster), or leave --launcher out to run it here"
        )


def _record(run: Run) -> Path:
    return run.log.with_suffix(".job")


def _state(job: Any, force: bool = False) -> str:
    """The state in one word; Slurm says by whom a job was cancelled."""
    job = job.task(0)
    state = job.get_info(mode="force").get("State", "UNKNOWN") if force else job.state
    return str(state).split()[0].rstrip("+")
