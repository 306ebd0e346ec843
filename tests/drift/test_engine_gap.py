"""An engine's log-probabilities beside its captured routes: read in every form, and how much of the gap is routing."""

import base64
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drift_models import LENGTHS, PROMPT, captured_rows
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM

from moe_rl.cli import main
from moe_rl.drift.capture_files import read_capture
from moe_rl.drift.capture_logps import logps_of
from moe_rl.drift.check import checked
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CheckOptions
from moe_rl.measure.arithmetic import gap_split
from moe_rl.measure.scoring import TokenBatch, score_live, score_replayed
from moe_rl.routing import RoutedExperts


def sampled(place):
    """Of each sequence, what the engine said of the tokens that it sampled."""
    return [place.logps[b, PROMPT:n].tolist() for b, n in enumerate(LENGTHS)]


def lines(path, place, logps, routes=None, **more):
    """A line a sequence, with `logps` under `logprobs`."""
    path.write_text(
        "".join(
            json.dumps(
                {
                    "prompt_token_ids": words[:PROMPT],
                    "token_ids": words[PROMPT:],
                    "routed_experts": (ids if routes is None else routes[b]).tolist(),
                    "logprobs": logps[b],
                    **more,
                }
            )
            + "\n"
            for b, (words, ids) in enumerate(captured_rows(place))
        )
    )
    return path


def rows_of(place, form):
    """Lines of JSON as engines and trainers write them."""
    for (words, ids), logps in zip(captured_rows(place), sampled(place), strict=True):
        prompt, new = words[:PROMPT], words[PROMPT:]
        routes = {"routed_experts": ids.tolist()}
        parts, whole = {"prompt_token_ids": prompt, "token_ids": new, **routes}, {"tokens": words, **routes}
        named = [f"token_id:{token}" for token in new]
        if form == "plain":
            yield {**whole, "logprobs": logps}
        elif form == "of all tokens":
            yield {**whole, "logprobs": [None] * PROMPT + logps}
        elif form == "vllm":
            content = [{"token": name, "logprob": x, "top_logprobs": []} for name, x in zip(named, logps, strict=True)]
            yield {**parts, "logprobs": {"content": content}}
        elif form == "vllm completions":
            yield {**parts, "logprobs": {"tokens": ["a"] * len(new), "token_logprobs": logps, "text_offset": []}}
        elif form == "sglang":
            meta = {"output_token_logprobs": [[x, token, None] for x, token in zip(logps, new, strict=True)]}
            payload = base64.b64encode(ids.astype("<i4").tobytes()).decode()
            yield {"prompt_token_ids": prompt, "token_ids": new, "routed_experts": payload, "meta_info": meta}
        else:  # a turn of a tool before the last token, whose zero is none
            logps, mask = [*logps[:-2], 0.0, logps[-1]], [*[1] * (len(logps) - 2), 0, 1]
            yield {**whole, "rollout_log_probs": logps, "loss_mask": mask, "response_length": len(new)}


@pytest.mark.parametrize("form", ["plain", "of all tokens", "vllm", "vllm completions", "sglang", "slime"])
def test_every_form_of_a_line_gives_the_same_log_probabilities(place, tmp_path, form):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(place, form)))
    for found, given, n in zip(read_capture(path, 2).logps, sampled(place), LENGTHS, strict=True):
        expected = np.array([np.nan] * PROMPT + given)
        expected[-2] = np.nan if form == "slime" else expected[-2]
        assert len(found) == n
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", ["slime", "npz", "npz of responses", "safetensors"])
def test_dumps_and_padded_files_give_them_too(place, tmp_path, form):
    measured = place.mask & (torch.arange(LENGTHS[0]) >= PROMPT)
    if form == "slime":
        path = tmp_path / "x.pt"
        samples = [
            {"tokens": words, "rollout_routed_experts": torch.tensor(ids), "rollout_log_probs": logps}
            for (words, ids), logps in zip(captured_rows(place), sampled(place), strict=True)
        ]
        samples[1] |= {"rollout_log_probs": None, "response_length": 23}  # an aborted one has none
        torch.save({"samples": samples}, path)
    elif form == "safetensors":
        path = tmp_path / "x.safetensors"
        tokens = place.ids.masked_fill(~place.mask, -1)
        held = {"tokens": tokens, "routed_experts": torch.from_numpy(place.engine)}
        save_file(held | {"logprobs": place.logps, "loss_mask": measured.long()}, path)
    else:
        path, start = tmp_path / "x.npz", 0
        held = {"input_ids": place.ids, "attention_mask": place.mask, "routed_experts": place.engine}
        if form == "npz of responses":  # of verl: prompts padded on the left, responses on the right, with zeros
            held = {k: np.pad(x, [(0, 0), (2, 0)] + [(0, 0)] * (np.ndim(x) - 2)) for k, x in held.items()}
            start = PROMPT
        np.savez(path, **held, rollout_log_probs=place.logps[:, start:], response_mask=measured[:, start:])
    found = read_capture(path, 2).logps
    for b, (logps, given) in enumerate(zip(found, sampled(place), strict=True)):
        expected = np.array([np.nan] * PROMPT + given)
        np.testing.assert_array_equal(logps, expected * np.nan if form == "slime" and b else expected)


def text_of(place, temperature=1.0):
    return TokenBatch(place.ids, place.mask, place.mask & (torch.arange(LENGTHS[0]) >= PROMPT), temperature)


def test_an_engine_that_is_the_bf16_copy_is_as_far_as_the_copy_and_as_three_lines_say(place, tmp_path):
    gap = checked(CheckOptions(lines(tmp_path / "x.jsonl", place, sampled(place)), place.model)).logprobs
    assert (gap.tokens, gap.sequences, gap.impossible, gap.not_replayed) == (sum(LENGTHS) - 2 * PROMPT, 2, 0, "")
    assert gap.copy_dtype == "bfloat16"
    engine, copy = ({k: v for k, v in gaps.items() if v is not None} for gaps in (gap.engine, gap.copy))
    assert engine == pytest.approx(copy, rel=1e-4) and engine["gap_mean"] > 0
    model, text = Qwen3MoeForCausalLM.from_pretrained(place.model).eval(), text_of(place)
    live = score_live(model, text)
    replayed = score_replayed(model, text, place.routes, live.routes)
    said = gap_split(live.logps - place.logps, replayed - place.logps, text.completion_mask)
    assert engine == pytest.approx({k: v for k, v in said.items() if math.isfinite(v)}, rel=1e-4)
    assert said["gap_mean"] != said["gap_mean_replayed"], "the copy took other routes somewhere"


@pytest.fixture(scope="module")
def rerouted(place):
    """An engine that differs in nothing but two experts: the model under routes of which two slots are others."""
    model, text = Qwen3MoeForCausalLM.from_pretrained(place.model).eval(), text_of(place)
    own = score_live(model, text).routes
    ids = own.ids.clone()
    for at in (10, 20):
        ids[0, at, 0, 0] = next(e for e in range(8) if e not in ids[0, at, 0])
    routes = RoutedExperts(ids, own.sites, 8)
    engine = np.zeros_like(place.engine)
    engine[:, :, 1:] = ids.numpy()
    logps = score_replayed(model, text, routes, own)
    return SimpleNamespace(ids=place.ids, mask=place.mask, model=place.model, engine=engine, logps=logps)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_where_nothing_but_routes_differs_routing_is_all_of_the_gap(rerouted, tmp_path, batch_size):
    path = lines(tmp_path / "x.jsonl", rerouted, sampled(rerouted))
    result = checked(CheckOptions(path, rerouted.model, batch_size=batch_size))
    engine = result.logprobs.engine
    assert result.faults == () and engine["gap_mean"] > 1e-4
    assert engine["routing_share_gap_mean"] == pytest.approx(1, abs=1e-2)
    assert engine["gap_max_replayed"] < 1e-5 < 1e-3 < engine["gap_max"]


def test_routes_with_a_fault_are_not_replayed(rerouted, tmp_path, capsys):
    late = [np.roll(ids, 1, axis=0) for _, ids in captured_rows(rerouted)]
    path = lines(tmp_path / "x.jsonl", rerouted, sampled(rerouted), late)
    with pytest.raises(SystemExit, match="1"):
        main(["check-routes", str(path), "--model", rerouted.model, "--json"])
    found = json.loads(capsys.readouterr().out)["logprobs"]
    assert "must be right first" in found["not_replayed"]
    assert found["engine"]["gap_mean"] > 1e-4 and "gap_mean_replayed" in found["copy"]
    assert not [name for name in found["engine"] if "replayed" in name or "share" in name]
    with pytest.raises(SystemExit, match="1"):
        main(["check-routes", str(path), "--model", rerouted.model])
    said = capsys.readouterr().out
    assert "How much of that is routing is not said: the captured routes are not" in said
    assert "engine, routes replayed" not in said and "bfloat16 copy, routes replayed" in said


def test_where_a_token_has_no_route_nothing_is_taken_apart(rerouted, tmp_path):
    ids = [ids.astype(np.int64) for _, ids in captured_rows(rerouted)]
    ids[1][3] = -1
    path = lines(tmp_path / "x.jsonl", rerouted, sampled(rerouted), ids)
    found = checked(CheckOptions(path, rerouted.model))
    assert not found.faults and found.logprobs.not_replayed == "1 token without all of its routes."
    assert "gap_mean_replayed" not in found.logprobs.engine
    ids[1][3] = rerouted.engine[1, 3]
    for some in ids:
        some[:, 0] = -1  # the dense layer has no routes that could be missing
    found = checked(CheckOptions(lines(path, rerouted, sampled(rerouted), ids), rerouted.model))
    assert not found.faults and found.logprobs.not_replayed == ""


def test_the_command_says_what_routing_makes(rerouted, tmp_path, capsys):
    path = lines(tmp_path / "x.jsonl", rerouted, sampled(rerouted))
    with pytest.raises(SystemExit, match="0"):
        main(["check-routes", str(path), "--model", rerouted.model])
    said = capsys.readouterr().out
    assert "with the engine's routes replayed: routing makes 100 %. Of what its own bfloat16 copy" in said
    assert "engine, routes replayed" in said and "58 sampled tokens of 2 sequences at temperature 1" in said


def test_temperature_is_of_both_and_a_gap_beyond_arithmetic_is_not_taken_apart(place, tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(place.model).eval()
    cold = SimpleNamespace(**{**vars(place), "logps": score_live(model, text_of(place, 0.5)).logps})
    path = lines(tmp_path / "x.jsonl", cold, sampled(cold))
    gap = checked(CheckOptions(path, place.model, temperature=0.5)).logprobs
    assert gap.temperature == 0.5 and gap.engine["gap_max"] < 1e-5
    gap = checked(CheckOptions(path, place.model)).logprobs
    assert gap.engine["gap_mean"] > 0.5 and "--temperature" in gap.not_replayed
    assert "gap_mean_replayed" not in gap.engine
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DriftError, match=r"--temperature: a number of at least 0.01"):
            checked(CheckOptions(path, place.model, temperature=wrong))


def test_tokens_of_no_probability_are_left_out_and_counted(place, tmp_path, capsys):
    logps = sampled(place)
    logps[0][0], logps[0][1] = -math.inf, -9999.0  # the second is what vLLM's server writes
    path = lines(tmp_path / "x.jsonl", place, logps)
    gap = checked(CheckOptions(path, place.model)).logprobs
    assert (gap.tokens, gap.impossible) == (sum(LENGTHS) - 2 * PROMPT - 2, 2)
    assert all(math.isfinite(gap.engine[name]) for name in ("gap_mean", "k3", "gap_max_replayed"))
    none = [[-math.inf] * len(row) for row in logps]
    said = []
    assert checked(CheckOptions(lines(path, place, none), place.model), said.append).logprobs is None
    assert said[-1].startswith("no token here has a log-probability")


def test_cut_sequences_lose_their_log_probabilities_with_their_tokens(place, tmp_path):
    path = lines(tmp_path / "x.jsonl", place, sampled(place))
    gap = checked(CheckOptions(path, place.model, max_tokens=30, max_sequences=1)).logprobs
    assert (gap.tokens, gap.sequences) == (30 - PROMPT, 1)


def test_what_is_no_log_probability_is_refused_by_place(place, tmp_path):
    path = tmp_path / "x.jsonl"

    def refused(said, at, value, **more):
        logps = sampled(place)
        logps[1][at : at + 1] = value
        with pytest.raises(DriftError, match=said):
            read_capture(lines(path, place, logps, **more), 2)

    refused(r"x\.jsonl line 2, position 8: logprobs is nan; a log-probability is at most 0", 3, [math.nan])
    refused(r"line 2, position 8: logprobs is 0\.5; .*Are they probabilities", 3, [0.5])
    refused(r"line 2, position 8: logprobs is '-1', not a number", 3, ["-1"])
    refused(r"line 2, position 8: logprobs is True, not a number", 3, [True])
    refused(r"line 2: logprobs has 22 values for 28 tokens, 23 of them sampled", 3, [])
    refused(r"line 1: the mask beside logprobs is not 35 of 0 and 1", 0, [-1.0], loss_mask=[1, 0])
    refused(r"line 1, position 5: output_token_logprobs is of token 64, the sequence has", 0, [-1.0],
            meta_info={"output_token_logprobs": [[-1.0, 64, None]] * 35}, logprobs=None)  # fmt: skip
    refused(r"line 1: logprobs are in no form that is known \(KeyError: 'token_logprobs'\)", 0, [-1.0], logprobs={})
    with pytest.raises(DriftError, match=r"x: logprobs has 3 values for 2 tokens, 3 of them sampled"):
        logps_of({"logprobs": [-1.0] * 3, "response_length": 3}, [1, 2], "x")
    for asked in (True, 1):  # the request's parameter beside what came of it
        assert logps_of({"logprobs": asked}, [1, 2], "x") is None
        found = logps_of({"logprobs": asked, "output_token_logprobs": [[-1.0, 2, None]]}, [1, 2], "x")
        np.testing.assert_array_equal(found, [np.nan, -1.0])
    whole = [[-1.0] * n for n in LENGTHS]
    with pytest.raises(
        DriftError, match=r"position 0: logprobs has a value for the first token, which follows nothing"
    ):
        read_capture(lines(path, place, whole), 2)
    lines(path, place, [[1e-6, *row[1:]] for row in sampled(place)])
    assert read_capture(path, 2).logps[0][PROMPT] == 1e-6, "rounding"


def test_padded_log_probabilities_need_a_mask_that_fits(place, tmp_path):
    path, held = tmp_path / "x.npz", place.mask & (torch.arange(LENGTHS[0]) >= PROMPT)

    def refused(said, **arrays):
        np.savez(path, tokens=place.ids, attention_mask=place.mask, routed_experts=place.engine, **arrays)
        with pytest.raises(DriftError, match=said):
            read_capture(path, 2)

    logps = place.logps.numpy()
    refused(r"x\.npz: logprobs without response_mask or loss_mask of their shape", logprobs=logps)
    refused(r"logprobs \[2, 40\] and their mask \[2, 35\] do not fit tokens \[2, 40\]", logprobs=logps,
            response_mask=held[:, 5:])  # fmt: skip
    refused(r"the mask beside logprobs holds other values than 0 and 1", logprobs=logps, response_mask=2 * held.long())
    refused(r"sequence 1: the mask beside logprobs is 1 on padding, first in column 28", logprobs=logps,
            response_mask=held | ~place.mask)  # fmt: skip
    refused(r"logprobs are bool, expected numbers", logprobs=logps < 0, response_mask=held)
    wrong = logps.copy()
    wrong[1, 7] = 2
    refused(
        r"sequence 1, position 7: logprobs is 2; a log-probability is at most 0", logprobs=wrong, response_mask=held
    )
    refused(r"sequence 0, position 0: logprobs has a value for the first token", logprobs=logps,
            response_mask=place.mask)  # fmt: skip
