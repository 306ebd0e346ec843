"""Routes of the engine that sampled a batch of TRL, from `rollout_func` or colocated vLLM, for R3 and measurements."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_rl.routing import RoutedExperts, RoutingError, replay_routes

FIELD = "routed_experts"
"""Key in the dict that `rollout_func` returns: integers `[P+G-1, layers, K]` (or P+G rows) per sequence."""


class SampledRoutes:
    """Collector of the sampling engine's routes of one batch, which aligns them with the batch's tokens."""

    def __init__(self) -> None:
        self._collected: list[Any] = []  # vLLM's routes, in the order of its answers
        self._batch: tuple[list[Any], list[int], list[int]] | None = None
        self.problem = ""  # why the batch's log-probabilities cannot be compared; see `take`

    @contextmanager
    def asked_of_vllm(self, wanted: bool) -> Iterator[None]:
        """Context manager: if `wanted`, TRL makes its colocated vLLM with `enable_return_routed_experts=True`."""
        from trl.generation import vllm_generation

        engine = getattr(vllm_generation, "LLM", None)  # None unless vLLM is installed
        if not wanted or engine is None:
            yield
            return
        vllm_generation.LLM = lambda *args, **kwargs: engine(*args, enable_return_routed_experts=True, **kwargs)
        try:
            yield
        finally:
            vllm_generation.LLM = engine

    def listen(self, engine: Any) -> None:
        """Collect the routes of all further answers of a vLLM engine; TRL keeps only tokens and log-probabilities."""
        generate = engine.generate

        def listening(*args: Any, **kwargs: Any) -> Any:
            answers = generate(*args, **kwargs)
            self._collected += [getattr(one, FIELD, None) for answer in answers for one in answer.outputs]
            return answers

        engine.generate = listening

    def forget(self) -> None:
        """Drop the routes collected before a batch: of an evaluation, a callback, or an interrupted batch."""
        self._collected = []

    def take(
        self,
        fields: Mapping[str, Any] | None,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float | None]] | None = None,
    ) -> None:
        """Take the routes of a batch that was just sampled, and check its log-probabilities.

        fields: those that `rollout_func` returned; None without one. Raises RoutingError if a sequence has no routes.
        Sets `problem` to why the engine's log-probabilities cannot be compared; it is empty if they can."""
        given = self._collected if fields is None else fields.get(FIELD)
        found, self._collected = [] if given is None else list(given), []
        missing = [i for i, one in enumerate(found) if one is None]
        if len(found) != len(answers) or missing:
            raise RoutingError(
                f"R3 and measure_engine take the sampling engine's routes, one array [P+G-1, layers, K] for each of "
                f"{len(answers)} sequences; got {len(found)}, of which {len(missing)} are empty. rollout_func returns "
                f"them as the field {FIELD!r}; vLLM must be started with enable_return_routed_experts and support it"
            )
        self.problem = _problem(logps, answers)
        self._batch = found, [len(x) for x in prompts], [len(x) for x in answers]

    def routes(self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> RoutedExperts:
        """Return the batch's routes `[B,T,L,K]` in TRL's padding: prompts end and completions begin at one column."""
        if self._batch is None:
            raise RoutingError("no batch was sampled since the last one: there are no routes to replay")
        (arrays, prompts, answers), self._batch = self._batch, None
        begin, position = input_ids.shape[1] - logits_to_keep, torch.arange(input_ids.shape[1])
        first, last = (torch.tensor(lengths)[:, None] for lengths in (prompts, answers))
        mask = (position >= begin - first) & (position < begin + last)
        tokens = torch.where(mask, input_ids.cpu(), -1)
        return RoutedExperts.from_vllm(arrays, model, mask=mask, tokens=tokens).to(input_ids.device)


def _problem(logps: Sequence[Sequence[float | None]] | None, answers: Sequence[Sequence[int]]) -> str:
    """Return why an engine's log-probabilities are not one number (or None) per sampled token; "" if they are."""
    if logps is None:
        return "the engine that samples gave none"
    pairs = list(zip_longest(map(len, logps), map(len, answers), fillvalue=0))
    wrong = next((i for i, (said, tokens) in enumerate(pairs) if said != tokens), None)
    if wrong is not None:
        return (
            f"sequence {wrong} of {len(answers)} has {pairs[wrong][0]} log-probabilities of the sampling engine, "
            f"for {pairs[wrong][1]} tokens of its answer: rollout_func returns one for each, as 'logprobs'"
        )
    values = [value for one in logps for value in one if value is not None]
    no_number = next((value for value in values if np.ndim(value) or isinstance(value, str)), None)
    if no_number is not None:
        return f"rollout_func returns a {type(no_number).__name__} for a token as 'logprobs', expected a number"
    known = not all(map(math.isnan, values))
    return "" if known or not any(answers) else "the engine that samples gave no token a log-probability"


def replayed_in_chunks(
    score: Any, model: nn.Module, text: Mapping[str, Any], routes: RoutedExperts, batch_size: int
) -> tuple[Tensor, RoutedExperts]:
    """Return TRL's log-probabilities under forced routes, and the routes that the routers would have chosen.

    Scores in TRL's own chunks, because routes are replayed for one call of the model at a time."""
    logps, choices = [], []
    for rows in torch.arange(len(text["input_ids"])).split(batch_size):
        where = rows.to(text["input_ids"].device)
        chunk = {key: value[where] if isinstance(value, Tensor) else value for key, value in text.items()}
        with torch.no_grad(), replay_routes(model, routes.rows(rows), shadow=True) as forced:
            logps.append(score(model, **chunk, batch_size=batch_size)[0])
        choices.append(forced.shadow)
    return torch.cat(logps), RoutedExperts.cat(choices)


def refuse_unsampled(trainer: Any) -> None:
    """Raise RoutingError if no engine gives the routes that R3 replays and `measure_engine` compares."""
    if trainer.rollout_func is not None:
        return
    if not trainer.use_vllm:
        raise RoutingError(
            "R3 and measure_engine take the routes of the engine that samples, and here the trained model itself "
            f'samples: use replay="R2" or "none" alone, or a rollout_func that returns the field {FIELD!r}, or a '
            "colocated vLLM"
        )
    if trainer.vllm_mode != "colocate":
        raise RoutingError(
            "R3 and measure_engine with vllm_mode='server': TRL's client drops the routes from the server's answers. "
            "Use 'colocate', or a rollout_func that asks a server started with --enable-return-routed-experts and "
            f"returns {FIELD!r}"
        )
    if trainer.args.vllm_tensor_parallel_size > 1 or trainer.tools:
        raise RoutingError(
            "R3 and measure_engine with vLLM take one answer for each sequence of one process: no tensor parallelism "
            f"and no tools. A rollout_func may return {FIELD!r} for whatever it does"
        )
