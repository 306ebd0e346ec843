"""Launcher that makes runs as jobs of a cluster, through submitit.

The run folders are the same as without a cluster, and are watched from where the study was started. submitit hands a
job its arguments (strings and numbers) in a pickle under `logs/jobs`; this module reads no pickle.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_rl.done import NAME
from moe_rl.files import still_written, write_json
from moe_rl.study.config import ConfigError
from moe_rl.study.job import run_job
from moe_rl.study.launchers import NotTakenError
from moe_rl.study.run import check_task
from moe_rl.study.runs import Run, last_line
from moe_rl.training.launch import DistributedError, check_shares

CLUSTERS = {"slurm": "slurm", "submitit-local": "local"}
"""Value of `--launcher` -> submitit's name of the cluster."""
DEFAULTS: dict[str, Any] = {"timeout_min": 720}
SHARED = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "stderr_to_stdout")
"""Options that submitit has for every cluster; all other options are Slurm's."""
OURS = ("name", "job_name", "tasks_per_node", "ntasks_per_node", "array_parallelism")
"""Options that are decided here and cannot be given."""
HELD = ("CONFIGURING", "REQUEUE_HOLD", "RESIZING", "SUSPENDED")
"""States of jobs that go on, but that submitit takes for final, so that it does not ask again."""
GOING_ON = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", *HELD)
UNKNOWN = "UNKNOWN"
"""State of a job if sacct did not answer, or does not know the job (yet)."""
REQUEUED = ("PREEMPTED", "NODE_FAIL")
"""States after which Slurm may queue the same job again."""
PATIENCE = 15.0  # seconds until a node's last writes are seen here, over a network, and sacct knows a new job
OF_REQUEUED = 8  # times PATIENCE, until a job in a state of REQUEUED is given up
ASK_AGAIN = 60.0  # seconds between two questions about jobs in a state of HELD


def job_options(words: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` words as submitit's parameters.

    Options of sbatch get the prefix `slurm_`. Values stay text, except `true`, `false`, and numbers of the options that
    submitit counts with.

    Raises:
        ConfigError: a word is no `key=value`, an option that is decided here, or no number of nodes.
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
        number = key in (*SHARED, "signal_delay_s", "time")
        options[key if key in SHARED else f"slurm_{key}"] = _value(value, number)
    nodes = options.get("nodes", 1)
    if type(nodes) is not int or nodes < 1:
        raise ConfigError(f"--launcher-options nodes={nodes}: expected a whole number of at least 1")
    return options


def _value(text: str, number: bool) -> Any:
    """Return an option's text as a bool if it is one, as a number if `number` and it is one, else as it is given."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if number and text.isdecimal():
        return int(text)
    return float(text) if number and re.fullmatch(r"\d+\.\d+", text) else text


class Jobs:
    """Launcher that makes each run as a job of a cluster.

    A study that is stopped leaves Slurm's jobs alone. The study, when started again, finds the jobs that go on
    (`ARM_seedN.job` beside the log holds a job's number) and watches them. Jobs of submitit's local executor end with
    the study, unless a signal ended it; while they go on, the study does not start these runs again.

    Args:
        cluster: `slurm`; or `submitit-local`, which makes the same jobs as processes of this machine, for trials.
        study, output: name and folder of the study.
        options: parameters for submitit, from `job_options`.

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
        self.until: float | None = None
        self.asked = -ASK_AGAIN

    @property
    def nodes(self) -> int:
        return int(self.options.get("nodes", 1))

    def check(self, run: Run) -> None:
        """Raise what the run's job would raise after it has waited for its nodes: ConfigError or TaskError."""
        check_task(run.config)
        distributed = run.config.distributed
        processes = 1 if distributed.strategy == "none" else distributed.processes
        if processes is None:
            raise ConfigError(
                f"{run.name}: distributed.strategy is {distributed.strategy}; say over how many processes in all: "
                "--distributed.processes N"
            )
        if processes % self.nodes:
            raise ConfigError(
                f"{run.name}: distributed.processes: {processes} cannot be shared by nodes={self.nodes} equally"
            )
        try:
            check_shares(run.config, processes)
        except DistributedError as error:
            raise ConfigError(f"{run.name}: {error}") from error

    def start(self, run: Run, arguments: Sequence[object]) -> None:
        if self.cluster == "local" and still_written(run.folder):
            raise ConfigError(f"{run.name}: another process writes to {run.folder}, a job of an earlier start?")
        job = self._going_on(run) or self._submit(run, arguments)
        self.jobs[run.folder] = job
        run.problem, run.note = "", f"job {job.job_id} waits"

    def _submit(self, run: Run, arguments: Sequence[object]) -> Any:
        """Submit the run as a new job, record its number, and return the job; raise NotTakenError if that fails."""
        distributed = run.config.distributed
        processes = None if distributed.strategy == "none" else distributed.processes
        settings = {} if run.rounding == "native" else {"ATEN_CPU_CAPABILITY": run.rounding}
        self.executor.update_parameters(name=f"{self.study}_{run.arm}_seed{run.seed}")
        words = [str(argument) for argument in arguments]
        try:
            job = self.executor.submit(run_job, words, str(run.log), processes, settings)
        except Exception as error:  # submitit's, with what sbatch said
            raise NotTakenError(f"{run.name}: the job was not taken: {' '.join(str(error).split())}") from error
        try:
            write_json(_record(run), {"cluster": self.cluster, "job": job.job_id})
        except OSError as error:  # without a record, a study that is started again would submit the run again
            job.cancel(check=False)
            raise NotTakenError(
                f"{run.name}: job {job.job_id} was cancelled, as {_record(run)} cannot be written ({error.strerror})"
            ) from error
        return job

    def _going_on(self, run: Run) -> Any | None:
        """Return the job that an earlier start of the study left with this run, if that job has not ended; else None.

        Raises ConfigError: nobody can tell whether the job has ended; a second job would write the same files.
        """
        try:
            record = json.loads(_record(run).read_text())
            cluster, number = record["cluster"], str(record["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not cluster == self.cluster == "slurm":
            return None
        import submitit

        job: Any = submitit.SlurmJob(folder=self.folder, job_id=number, tasks=list(range(self.nodes)))
        self.until = time.monotonic() + self.patience if self.until is None else self.until
        while (state := _state(job, force=True)) == UNKNOWN and time.monotonic() < self.until:
            time.sleep(1.0)
        if state == UNKNOWN and not _returned(job):
            raise ConfigError(
                f"an earlier start of the study left job {number} with this run, and sacct does not say whether it "
                f"goes on. Try again later; if squeue does not list it either, delete {_record(run)}"
            )
        return job if state in GOING_ON else None

    def ended(self, run: Run) -> bool | None:
        if (run.folder / NAME).exists():
            return self._forget(run, True)
        job, now = self.jobs[run.folder], time.monotonic()
        over = job.done() and _returned(job)
        for force in (False, True):  # what submitit knows may be ten minutes old
            state = _state(job, force)
            goes_on = state in (*GOING_ON, UNKNOWN)
            if goes_on and not over:
                self.over.pop(run.folder, None)
                run.note = "" if state == "RUNNING" else f"job {job.job_id} {state.lower()}"
                if state in HELD and now - self.asked >= ASK_AGAIN:
                    self.asked = now
                    job.watcher.clear()
                return None
            if now - self.over.setdefault(run.folder, now) < self.patience * (OF_REQUEUED if state in REQUEUED else 1):
                return None
        said = last_line(run.log) if run.log.exists() else f"nothing was printed; see {job.task(0).paths.stderr}"
        how = "" if goes_on else f" ({state})"
        run.problem = f"job {job.job_id} ended{how} before the run was done: {said}"
        return self._forget(run, False)

    def _forget(self, run: Run, finished: bool) -> bool:
        """Drop the run's job, which has ended, and its record; return `finished`."""
        run.note = ""
        del self.jobs[run.folder]
        self.over.pop(run.folder, None)
        with suppress(OSError):  # a record that stays is of a job that has ended, which the next start will see
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
    """Raise ConfigError if jobs cannot be started here; the message says what is missing."""
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
    """Return the path of the file that holds the number of the run's job."""
    return run.log.with_suffix(".job")


def _state(job: Any, force: bool = False) -> str:
    """Return the state of a job in one word, without the user whom Slurm names for a cancelled job.

    force: ask Slurm now, instead of taking the state that submitit has.
    """
    if force:
        job.watcher.clear()
    return str(job.task(0).state).split()[0].rstrip("+")


def _returned(job: Any) -> bool:
    """Return whether the job's work has ended on every node, by the files that submitit writes at the end."""
    return all(job.task(i).paths.result_pickle.exists() for i in range(job.num_tasks))
