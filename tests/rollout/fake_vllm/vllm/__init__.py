"""A stand-in for vLLM 0.32 on a GPU: the documented calls that the server makes, computed with numpy."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm.qwen3_moe import Qwen3Moe, softmax

__version__ = "0.32.0"
STALE = "FAKE_VLLM_STALE"
"""Names a file; while it is there, reloading changes nothing."""


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    trace_decode_token_ids: list[int] | None = None


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    routed_experts: object


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model: str,
        dtype: str,
        skip_tokenizer_init: bool,
        generation_config: str,
        logprobs_mode: str,
        disable_log_stats: bool,
        seed: int,
        enable_prefix_caching: bool,
        enable_return_routed_experts: bool,
        enable_trace_replay: bool,
        max_num_seqs: int = 256,
    ):
        assert logprobs_mode == "processed_logprobs" and generation_config == "vllm" and enable_trace_replay
        assert dtype == "float32", "the only one that numpy has and vLLM, too"
        self.model, self.capture, self.cached = Qwen3Moe(model), enable_return_routed_experts, False

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        assert name == "reload_weights" and Path(kwargs["weights_path"], "config.json").exists()
        if not os.path.exists(os.environ.get(STALE, "")):
            self.model, self.cached = Qwen3Moe(kwargs["weights_path"]), True

    def reset_prefix_cache(self) -> bool:
        self.cached = False
        return True

    def generate(self, prompts: list[dict], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        assert not self.cached, "the prefix cache outlived its weights"
        print("to standard output, where a library may print")
        pairs = enumerate(zip(prompts, params, strict=True))
        return [self._answer(str(i), prompt["prompt_token_ids"], how) for i, (prompt, how) in pairs]

    def _answer(self, name: str, prompt: list[int], how: SamplingParams) -> RequestOutput:
        if how.trace_decode_token_ids is not None:
            given = how.trace_decode_token_ids[: how.max_tokens]
            logprobs = self._logprobs([*prompt, *given], how.temperature)[len(prompt) - 1 : -1]
            chosen = [{token: Logprob(float(row[token]))} for token, row in zip(given, logprobs, strict=True)]
            return RequestOutput(name, list(prompt), [CompletionOutput(given, chosen, None)])
        generator = np.random.default_rng(how.seed)
        tokens, chosen = list(prompt), []
        while len(chosen) < how.max_tokens:
            row = self._logprobs(tokens, how.temperature)[-1]
            token = int(row.argmax() if how.temperature == 0 else generator.choice(len(row), p=softmax(row)))
            chosen.append({token: Logprob(float(row[token]))})
            tokens.append(token)
            if token in how.stop_token_ids:
                break
        routes = self.model.forward(tokens)[1][:-1].astype(np.uint8) if self.capture else None
        return RequestOutput(name, list(prompt), [CompletionOutput(tokens[len(prompt) :], chosen, routes)])

    def _logprobs(self, tokens: list[int], temperature: float) -> np.ndarray:
        return np.log(softmax(self.model.forward(tokens)[0].astype(np.float64) / (temperature or 1.0)))
