"""Checks that the processes which the launcher started are those that the study asks for.

accelerate can silently do something else than was asked for (one process instead of several, DDP instead of FSDP,
another precision, another device). Here that is an error, on every rank, before anything is loaded.
"""

import os
from typing import Any

from moe_rl.training.config import DistributedConfig

COMMAND = "torchrun --nproc_per_node N -m moe_rl run FILE --arm ARM"
CPU_LAUNCH = ". On a CPU, accelerate launch starts several with --multi_gpu, and one with --cpu, whatever it is asked"
LAUNCHED_BY = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which launchers state the number of processes: torch's, and those of MPI that accelerate
reads."""


class DistributedError(RuntimeError):
    """Error, the same on every rank, for processes that are not what the configuration asks for, or that disagree."""


def launched_processes() -> int:
    """Return how many processes torchrun or accelerate launch started; 1 without such a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check_launch(config: DistributedConfig, launched: int, environ: Any, device: str = "auto") -> None:
    """Raise DistributedError unless the launched processes are those that `config` and `device` ask for.

    environ: environment variables, in which accelerate's launcher passes its settings.
    device: `model.device`."""
    strategy, wanted = config.strategy, config.processes
    if wanted is not None and wanted != launched:
        raise DistributedError(
            f"distributed.processes: {wanted}, and {launched} {'was' if launched == 1 else 'were'} started. "
            f"Start them with {COMMAND}{CPU_LAUNCH}"
        )
    if strategy == "none" and launched > 1:
        raise DistributedError(
            f"{launched} processes were started, and distributed.strategy is none: each would train alone and write "
            "the same files. Choose ddp or fsdp2"
        )
    if strategy != "none" and launched == 1 and wanted is None:
        raise DistributedError(
            f"distributed.strategy: {strategy}, and there is one process. Start several with {COMMAND}, or say that "
            f"one is meant: distributed.processes: 1{CPU_LAUNCH}"
        )
    if strategy == "fsdp2" and "LOCAL_RANK" not in environ:
        raise DistributedError(f"distributed.strategy: fsdp2 needs a launcher, also for one process: {COMMAND}")
    # accelerate's launcher for one process sets MASTER_ADDR only if it was asked for several.
    alone = "ACCELERATE_USE_CPU" in environ and not any(name in environ for name in LAUNCHED_BY)
    if wanted is None and alone and "MASTER_ADDR" in environ:
        raise DistributedError(
            "accelerate launch was asked for several processes and started one. Start several with "
            f"{COMMAND}, or say that one is meant: distributed.processes: 1{CPU_LAUNCH}"
        )
    _check_accelerate(environ, device)


def _check_accelerate(environ: Any, device: str) -> None:
    """Raise DistributedError if accelerate's configuration asks for what this loop does not do, or would do twice."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true"):
            raise DistributedError(
                f"accelerate's configuration asks for {name}, which this loop would not follow: how weights are "
                "sharded is said by distributed.strategy. Launch with torchrun, or accelerate launch --multi_gpu "
                "(distributed_type: MULTI_GPU in its configuration)"
            )
    if environ.get("ACCELERATE_MIXED_PRECISION", "no") not in ("no", ""):
        raise DistributedError(
            f"accelerate's configuration asks for mixed precision {environ['ACCELERATE_MIXED_PRECISION']}: say so by "
            "model.dtype, or under fsdp2 by distributed.compute_dtype; mixed_precision: 'no' for accelerate"
        )
    if environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        raise DistributedError("accelerate's gradient accumulation is not followed: use optim.micro_batch")
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("no", ""):
        raise DistributedError(
            f"accelerate's configuration asks for torch.compile ({environ['ACCELERATE_DYNAMO_BACKEND']}): compiled "
            "models are not recorded and replayed reliably. Set dynamo_backend: 'no' there"
        )
    if environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true") and device == "cuda":
        raise DistributedError(
            "accelerate's configuration asks for the CPU, and model.device is cuda: the run would happen on the "
            "CPU. Leave --cpu (use_cpu) out, or set model.device: cpu"
        )


def check_shares(config: Any, size: int) -> None:
    """Raise DistributedError unless every batch of `config` (a RunConfig) can be shared by `size` ranks."""
    rollout, minibatches = config.rollout, config.optim.num_minibatches
    if rollout.prompts % (minibatches * size):
        raise DistributedError(
            f"rollout.prompts: {rollout.prompts} is no multiple of optim.num_minibatches x processes = {minibatches} x "
            f"{size}, so that ranks cannot have equal shares of whole groups"
        )
    shared = {"eval.prompts": config.eval.prompts}
    if config.probe.every or config.probe.decompose_every:
        shared["probe.sequences"] = config.probe.sequences
    for field, count in shared.items():
        if count < size:
            raise DistributedError(f"{field}: {count} cannot be shared by {size} processes, one each at least")
