"""The work of one job of a cluster: one run, in one process or, under torchrun, in several processes on its nodes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.processes import command_line, signal_name


def job_command(arguments: Sequence[str], processes: int | None, here: Any) -> list[str]:
    """Return the command line of `moe-rl ARGUMENTS`: one process, or this node's share of `processes` under torchrun.

    here: submitit's JobEnvironment.
    """
    if processes is None:  # submitit keeps the job from ending at SIGTERM: the run must not outlive the job
        return command_line(arguments)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes // here.num_nodes}"]
    if here.num_nodes == 1:
        torchrun += ["--standalone"]
    else:
        digits = int("".join(filter(str.isdigit, here.job_id)) or 0)
        port = 20000 + digits % 10000  # jobs that share a node need ports of their own
        torchrun += [f"--nnodes={here.num_nodes}", f"--node_rank={here.node}", "--rdzv_backend=c10d"]
        torchrun += [f"--rdzv_endpoint={here.hostnames[0]}:{port}", f"--rdzv_id={here.job_id}"]
    return [*torchrun, "-m", "moe_rl", *arguments]


def run_job(arguments: Sequence[str], log: str, processes: int | None, settings: Mapping[str, str]) -> None:
    """Run `moe-rl ARGUMENTS` as a job; add its output to the file `log`, and the signal that ended it, if one did.

    Args:
        processes: number of processes of the run, on all nodes; None: one process, without a launcher.
        settings: environment variables to add.

    Raises:
        subprocess.CalledProcessError: the command ended with an error.
        ConfigError: other CPU kernels are asked for, which this node does not have.
    """
    import submitit

    from moe_rl.study.shipped import ConfigError

    here = submitit.JobEnvironment()
    environment = {**os.environ, **settings, "PYTHONUNBUFFERED": "1"}
    with open(log if here.node == 0 else f"{log}.node{here.node}", "ab") as file:
        command = job_command(arguments, processes, here)
        try:
            if "ATEN_CPU_CAPABILITY" in settings:  # checked on this node, as a study checks its machine
                import torch

                from moe_rl.study.launchers import check_roundings

                check_roundings([settings["ATEN_CPU_CAPABILITY"]], torch.backends.cpu.get_cpu_capability())
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, check=True)
        except ConfigError as error:
            file.write(f"moe-rl: error: {error}\n".encode())
            raise
        except subprocess.CalledProcessError as error:
            if error.returncode < 0:  # a signal, which leaves no message
                file.write(f"moe-rl: error: ended by {signal_name(-error.returncode)}\n".encode())
            raise
