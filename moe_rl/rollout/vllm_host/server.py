"""Script that serves one vLLM engine: it answers requests on its standard input and output.

The script is run by the Python in which vLLM is installed and moe_rl is not: `python -I server.py FOLDER`. It ends when
its input ends, or its parent does, and then removes FOLDER. Frames go both ways: two lengths (8 bytes each), a JSON
header, safetensors; the output of vLLM goes to standard error. `moe_rl.rollout.vllm_engine` is the other end.
"""

import gc
import json
import os
import shutil
import struct
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load, save

LENGTHS = struct.Struct("<QQ")  # lengths of header and tensors, in bytes
VERSIONS = ("0.32", "0.33")
"""vLLM releases whose interfaces were read, and run as far as docs/engines.md says."""
WIDTH = 32
"""vLLM's CPU kernels for experts need hidden sizes that are multiples of this; vLLM's own error names no size."""
IDS = np.int16
"""Dtype of expert ids, which are all below 32,768; a small one, because routes are the largest part of an answer."""
CPU_CACHE = 2**28
"""Bytes of vLLM's KV cache on a CPU, unless the settings give a size."""


def frame(header: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> bytes:
    """Return a message as bytes: two lengths, the header in JSON, the tensors in safetensors."""
    text = json.dumps(header).encode()
    blob = save({name: np.ascontiguousarray(array) for name, array in tensors.items()}) if tensors else b""
    return LENGTHS.pack(len(text), len(blob)) + text + blob


def unframe(message: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return header and tensors of a message. Raises ValueError or SafetensorError if the bytes are no message."""
    if len(message) < LENGTHS.size or len(message) - LENGTHS.size != sum(LENGTHS.unpack_from(message)):
        raise ValueError(f"{len(message)} bytes that are no frame")
    end = LENGTHS.size + LENGTHS.unpack_from(message)[0]
    header = json.loads(message[LENGTHS.size : end])
    if not isinstance(header, dict):
        raise ValueError(f"a header that is no mapping: {header!r}")
    return header, load(message[end:]) if len(message) > end else {}


class CpuEngine:
    """An engine of vLLM's CPU build, in this process. Reloading weights gives wrong results there without an error, so
    new weights are loaded into an engine that is built anew. Routes are captured at the routers, because this build
    cannot return them."""

    device = "cpu"

    def __init__(self, model: str, settings: dict[str, Any]):
        from vllm import LLM

        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            hidden = json.load(file).get("hidden_size", 0)
        if hidden % WIDTH:
            raise ValueError(f"vLLM's CPU kernels want hidden_size divisible by {WIDTH}, the model has {hidden}")
        fixed = {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            # Every prompt is computed for every sequence: tokens from a prefix cache would have no routes.
            "enable_prefix_caching": False,
            # A prompt in parts fails by "CPU Generator does not use offset", because each sequence has a seed.
            "enable_chunked_prefill": False,
        }
        sized = settings.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}
        memory = {} if sized else {"kv_cache_memory_bytes": CPU_CACHE}  # by default vLLM takes nearly all memory
        self.llm = LLM(model=model, **common(settings), **memory, **fixed)
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.pieces: dict[str, list[tuple[int, int, np.ndarray]]] | None = None
        self.layers = self.runner.model_config.hf_text_config.num_hidden_layers
        self._capture()

    def load(self, model: str, settings: dict[str, Any]) -> "CpuEngine":
        """Return a new engine with the weights of the folder `model`. This one cannot be used any more."""
        from vllm.distributed import cleanup_dist_env_and_memory

        # vLLM runs nine garbage collections, three quarters of the time of this method; one is enough.
        collect, gc.collect = gc.collect, lambda *_: 0
        try:
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm, self.runner
            cleanup_dist_env_and_memory()
            collect()
            return type(self)(model, settings)
        finally:
            gc.collect = collect

    def generate(self, prompts: list[list[int]], params: list[Any], routes: bool) -> list[tuple[Any, Any]]:
        """Return vLLM's answer to each prompt, with its routes `[P+G-1, layers, K]` (P, G: tokens of prompt and answer)
        if `routes`, else None."""
        self.pieces = {} if routes else None
        try:
            answers = answered(self.llm, prompts, params)
            return [(answer, self._routes(answer) if routes else None) for answer in answers]
        finally:
            self.pieces = None

    def scores(self, tokens: list[list[int]], starts: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probabilities of each sequence's tokens from `starts` on, by one forward. vLLM's own for given
        tokens are those at temperature 1, so its logits are divided by `temperature` on their way."""
        from vllm import SamplingParams

        sampler = self.runner.sampler
        plain = type(sampler).compute_logprobs
        sampler.compute_logprobs = lambda logits: plain(logits.float() / temperature)
        try:
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
            answers = answered(self.llm, tokens, [params] * len(tokens))
        finally:
            del sampler.compute_logprobs
        return [
            [answer.prompt_logprobs[t][row[t]].logprob for t in range(start, len(row))]
            for answer, row, start in zip(answers, tokens, starts, strict=True)
        ]

    def _capture(self) -> None:
        """Make vLLM call a function with the experts that each router chooses."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        found = [module for module in self.runner.get_model().modules() if isinstance(module, MoERunner)]
        self.routers = sorted(module.layer_id for module in found)
        if len(set(self.routers)) != len(found) or not found:
            raise RuntimeError(
                f"expected routers, at most one in each layer; vLLM's model has them in layers {self.routers}"
            )
        for module in found:
            module.router.set_capture_fn(self._catcher(module.layer_id))

    def _catcher(self, layer: int) -> Any:
        """Return the function that stores one layer's routes in `pieces`, by request."""

        def catch(ids: Any) -> None:
            if self.pieces is None:
                return
            batch = self.runner.input_batch
            bounds = self.runner.query_start_loc.np
            rows = ids.to("cpu").numpy().astype(IDS, copy=True)
            for index, request in enumerate(batch.req_ids):
                part = rows[bounds[index] : bounds[index + 1]]
                start = int(batch.num_computed_tokens_cpu[index])
                self.pieces.setdefault(request.rpartition("-")[0], []).append((layer, start, part))

        return catch

    def _routes(self, answer: Any) -> np.ndarray:
        """Put one answer's routes together from `pieces`. Raises RuntimeError for a token routed twice or never."""
        assert self.pieces is not None
        pieces = self.pieces[answer.request_id]
        tokens = len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids)
        ids = np.full((tokens - 1, self.layers, pieces[0][2].shape[1]), -1, IDS)
        for layer, start, part in pieces:
            part = part[: len(ids) - start]  # the last token may have been fed by a step that ran ahead
            if (ids[start : start + len(part), layer] != -1).any():
                raise RuntimeError(
                    f"vLLM routed request {answer.request_id} twice in layer {layer}, token {start}: preempted for "
                    "lack of KV cache? Give it more (kv_cache_memory_bytes), or fewer sequences at a time (max_batch)"
                )
            ids[start : start + len(part), layer] = part
        lost = int((ids[:, self.routers] == -1).any(2).sum())
        if lost:
            raise RuntimeError(f"vLLM gave no routes for {lost} (token, layer) pairs of request {answer.request_id}")
        ids[:, [layer for layer in range(self.layers) if layer not in self.routers]] = 0  # dense, as vLLM's own arrays
        return ids


class GpuEngine:
    """An engine of vLLM on GPUs, by vLLM's documented interfaces alone. NOT RUN: written from the source of 0.32, and
    compared with that of 0.33."""

    device = "gpu"

    def __init__(self, model: str, settings: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(
            model=model,
            **common(settings),
            enable_prefix_caching=True,  # enable_return_routed_experts needs it
            enable_return_routed_experts=True,
            enable_trace_replay=True,
        )

    def load(self, model: str, settings: dict[str, Any]) -> "GpuEngine":
        """Load the weights of the folder `model`, drop the prefix cache of the old ones, and return this engine."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache after the weights changed")
        return self

    def generate(self, prompts: list[list[int]], params: list[Any], routes: bool) -> list[tuple[Any, Any]]:
        """Return answers and routes as `CpuEngine.generate` does."""
        found = []
        for answer in answered(self.llm, prompts, params):
            ids = getattr(answer.outputs[0], "routed_experts", None)
            if routes and ids is None:
                raise RuntimeError("vLLM returned no routed_experts, though enable_return_routed_experts is set")
            found.append((answer, np.asarray(ids).astype(IDS) if routes else None))
        return found

    def scores(self, tokens: list[list[int]], starts: list[int], temperature: float) -> list[list[float]]:
        """Return log-probabilities as `CpuEngine.scores` does, by decoding that is forced to the given tokens."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=len(row) - start,
                temperature=temperature,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                trace_decode_token_ids=row[start:],
            )
            for row, start in zip(tokens, starts, strict=True)
        ]
        prompts = [row[:start] for row, start in zip(tokens, starts, strict=True)]
        return [chosen_logps(answer.outputs[0]) for answer in answered(self.llm, prompts, params)]


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for any device. Log-probabilities are those of the distribution sampled from."""
    return {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # vLLM's sampling defaults, not the model's
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        **settings,
    }


def answered(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """Return vLLM's answers to prompts of token ids."""
    return llm.generate([{"prompt_token_ids": row} for row in prompts], params, use_tqdm=False)


def chosen_logps(output: Any) -> list[float]:
    """Return the log-probabilities (nats) of an output's own tokens."""
    return [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]


def split(flat: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Split tokens that were sent one behind the other into rows of these lengths."""
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


class Server:
    """A server of one engine: a method for each kind of request, which returns header and tensors of the answer."""

    engine: Any = None

    def open(self, ask: dict[str, Any], _: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Build the engine from the model in the folder `ask["model"]`; if there is an engine, load these weights."""
        started = time.monotonic()
        import vllm
        from vllm.platforms import current_platform

        if not vllm.__version__.startswith(tuple(f"{known}." for known in VERSIONS)):
            raise RuntimeError(f"vLLM {vllm.__version__} is not one of {', '.join(VERSIONS)}")
        if self.engine is None:
            self.engine = (CpuEngine if current_platform.is_cpu() else GpuEngine)(ask["model"], ask["settings"])
        else:
            self.engine = self.engine.load(ask["model"], ask["settings"])
        took = round(time.monotonic() - started, 3)
        return {"vllm": vllm.__version__, "device": self.engine.device, "seconds": took}, {}

    def sample(self, ask: dict[str, Any], given: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Sample one completion of each prompt. The answer has `tokens` and `logps` one behind the other, `lengths`,
        and, if asked, `routes` of all tokens but each sequence's last."""
        from vllm import SamplingParams

        prompts = split(given["tokens"], given["lengths"])
        params = [
            SamplingParams(
                max_tokens=ask["max_new_tokens"],
                temperature=ask["temperature"],
                seed=int(seed),
                stop_token_ids=ask["ends"],
                ignore_eos=True,  # `ends` has all end tokens
                logprobs=0,
                detokenize=False,
            )
            for seed in given["seeds"]
        ]
        answers = self.engine.generate(prompts, params, ask["routes"])
        outputs = [answer.outputs[0] for answer, _ in answers]
        found = {
            "tokens": np.concatenate([np.array(output.token_ids, np.int64) for output in outputs]),
            "lengths": np.array([len(output.token_ids) for output in outputs], np.int64),
            "logps": np.concatenate([np.array(chosen_logps(output), np.float32) for output in outputs]),
        }
        if ask["routes"]:
            for prompt, (answer, ids) in zip(prompts, answers, strict=True):
                rows = len(prompt) + len(answer.outputs[0].token_ids) - 1
                if ids.ndim != 3 or len(ids) != rows:
                    raise RuntimeError(f"vLLM's routes are {list(ids.shape)} for {rows + 1} tokens, not [{rows}, L, K]")
            found["routes"] = np.concatenate([ids for _, ids in answers])
        return {}, found

    def logps(self, ask: dict[str, Any], given: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the log-probabilities of each sequence's tokens from `starts` on, one behind the other."""
        rows = split(given["tokens"], given["lengths"])
        found = self.engine.scores(rows, given["starts"].tolist(), ask["temperature"])
        return {}, {"logps": np.array([value for row in found for value in row], np.float32)}


def serve(read: BinaryIO, write: BinaryIO, server: Any) -> None:
    """Answer requests until the input ends. An exception is sent back as `error`, its traceback to standard error."""
    while len(lengths := read.read(LENGTHS.size)) == LENGTHS.size:
        ask, given = unframe(lengths + read.read(sum(LENGTHS.unpack(lengths))))
        try:
            answer = frame(*getattr(server, ask["do"])(ask, given))
        except Exception as error:
            traceback.print_exc()
            answer = frame({"error": f"{type(error).__name__}: {error}"})
        write.write(answer)
        write.flush()


def end_with_parent(folder: str) -> None:
    """Start a thread that ends this process, busy or not, within a second of its parent's end and removes `folder`."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent(sys.argv[1])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other processes run here, too
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # all prints go to standard error
    serve(sys.stdin.buffer, answers, Server())
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)  # does not wait for vLLM's threads
