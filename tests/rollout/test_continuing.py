"""Responses that go on: with the same weights nothing changes, with others each token is its writer's; turns."""

import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_rl.measure import token_logps
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import TaskConfig, make_task, sample
from moe_rl.rollout.continuing import (
    append_text,
    extend,
    in_turns,
    partial_responses,
    right_aligned,
    unfinished,
    version_metrics,
)
from moe_rl.rollout.engine import ModelEngine
from moe_rl.rollout.task import TaskError
from moe_rl.routing import replay_routes

TASK = make_task(TaskConfig("calculator"))
TOKENIZER = char_tokenizer(TASK.alphabet)
SHAPE = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)


def model(seed=0):
    return build_tiny(replace(SHAPE, seed=seed), TOKENIZER)


def problems(count=3):
    return [TASK.problem(random.Random(number)) for number in range(count)]


def begun(policy, tokens=4, record=True, group_size=2):
    generator = torch.Generator().manual_seed(1)
    options = {"group_size": group_size, "max_new_tokens": tokens, "generator": generator, "record": record}
    return sample(policy, TOKENIZER, problems(), **options)


def gone_on(policy, rollout, tokens=5, longest=9, seed=2, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"record_routes": True, "temperature": 1.0, **options}
    engine = ModelEngine(policy, TOKENIZER)
    return extend(engine, rollout, tokens=tokens, longest=longest, generator=generator, **options)


def scored(policy, rollout):
    tokens = rollout.input_ids, rollout.attention_mask, rollout.completion_mask
    with torch.no_grad():
        return token_logps(policy, *tokens).logps


def text_of(rollout, row):
    mask = rollout.completion_mask[row]
    return rollout.input_ids[row][mask].tolist()


def test_tokens_are_moved_right_in_order():
    ids, mask = torch.tensor([[9, 5, 6, 0], [0, 0, 0, 7]]), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1]]).bool()
    moved, kept = right_aligned(ids, mask)
    assert moved.tolist() == [[0, 9, 5, 6], [0, 0, 0, 7]] and kept.tolist() == mask.flip(1).sort(1).values.tolist()


def test_what_goes_on_keeps_what_was_written_and_is_scored_as_one_text():
    policy = model()
    first = begun(policy)
    whole = gone_on(policy, first)
    assert int(whole.lengths.max()) > 4
    for row in range(len(first)):
        before, after = text_of(first, row), text_of(whole, row)
        assert after[: len(before)] == before
        assert (after == before) == bool(first.finished[row]), "only what had no end goes on"
        assert len(after) <= 9 and bool(whole.finished[row]) == (after[-1] == TOKENIZER.eos_token_id)
    torch.testing.assert_close(whole.logps, scored(policy, whole), atol=1e-5, rtol=1e-5)
    assert bool((unfinished(whole, 9) == (~whole.finished & (whole.lengths < 9))).all())
    again = gone_on(policy, whole, seed=3)
    assert again is whole or bool(unfinished(whole, 9).any()), "at its limit nothing goes on"


def test_routes_of_one_version_are_those_of_its_forward_and_the_last_token_has_none():
    policy = model()
    whole = gone_on(policy, begun(policy))
    with torch.no_grad(), replay_routes(policy, whole.routes):
        replayed = token_logps(policy, whole.input_ids, whole.attention_mask, whole.completion_mask).logps
    torch.testing.assert_close(replayed, whole.logps, atol=1e-5, rtol=1e-5)
    last = torch.where(whole.attention_mask, torch.arange(whole.input_ids.shape[1]), -1).amax(1)
    live = whole.routes.live.all(-1)
    expected = ~whole.attention_mask
    expected[torch.arange(len(whole)), last] = True
    assert torch.equal(live, expected)


def test_every_token_has_the_version_and_the_log_probability_of_its_writer():
    old, new = model(0), model(7)
    first = begun(old)
    first = replace(first, versions=torch.where(first.completion_mask, 0, -1))
    mixed = gone_on(new, first, version=1)
    assert torch.equal(mixed.versions >= 0, mixed.completion_mask)
    by_old, by_new = mixed.versions == 0, mixed.versions == 1
    assert bool(by_new.any()) and torch.equal(by_old.sum(1), first.lengths)
    for policy, own in ((old, by_old), (new, by_new)):
        torch.testing.assert_close(mixed.logps[own], scored(policy, mixed)[own], atol=1e-5, rtol=1e-5)
    width = first.input_ids.shape[1]
    known = ~first.routes.live
    assert torch.equal(mixed.routes.ids[:, :width][known], first.routes.ids[known]), (
        "the route its next token was drawn by"
    )
    with pytest.raises(ValueError, match="for all tokens"):
        gone_on(new, mixed)


def test_every_segment_of_every_batch_has_random_numbers_of_its_own():
    engine, drawn, drafts = ModelEngine(model(), TOKENIZER), [], deque()

    def numbers(index):
        drawn.append(index)
        return torch.Generator().manual_seed(index)

    options = {"segment": 3, "longest": 9, "version": 0, "group_size": 2, "temperature": 1.0, "record_routes": False}
    partial_responses(drafts, engine, problems, numbers, **options)
    assert len(drafts) == 2 and sorted(drawn) == [1, 2, 3, 4, 5, 6], "1 begins, goes on twice; 2 begins, goes on; 3"


def test_ages_of_tokens_by_hand():
    versions = torch.tensor([[0, 1, -1], [2, 2, 2]])  # before version 3: ages 3, 2 and 1, 1, 1
    found = version_metrics(SimpleNamespace(versions=versions, completion_mask=versions >= 0), 3)
    assert found == {"version_age": 8 / 5, "version_age_max": 3, "old_tokens": 1, "mixed_responses": 1 / 2}
    assert version_metrics(SimpleNamespace(versions=versions, completion_mask=versions > 0), 2)["old_tokens"] == 1 / 4


def test_text_that_is_not_the_policys_is_attended_and_counts_nowhere():
    policy = model()
    first = begun(policy)
    row = 1
    told = append_text(first, TOKENIZER, {row: "5;"})
    assert int(told.attention_mask[row].sum()) == int(first.attention_mask[row].sum()) + 2
    assert torch.equal(told.lengths, first.lengths) and not bool(told.finished[row])
    whole = gone_on(policy, told)
    assert "5;" in whole.completions[row] and float(whole.logps[~whole.completion_mask].abs().max()) == 0
    torch.testing.assert_close(whole.logps, scored(policy, whole), atol=1e-5, rtol=1e-5)


def test_routes_are_kept_for_all_of_a_rollout_or_for_none():
    policy = model()
    for record in (True, False):
        with pytest.raises(ValueError, match="routes are kept for all tokens of a rollout or for none"):
            gone_on(policy, begun(policy, record=record), record_routes=not record)
    assert gone_on(policy, begun(policy, record=False), record_routes=False).routes is None


def test_a_text_does_not_go_on_beyond_the_models_positions():
    policy = build_tiny(replace(SHAPE, max_position_embeddings=20), TOKENIZER)
    first = begun(policy)
    longest = int(first.attention_mask.sum(1)[~first.finished].max())
    assert gone_on(policy, first, tokens=5, longest=9).attention_mask.sum(1).max() <= 20
    gone_on(policy, first, tokens=5, longest=99)  # what has room now, whatever a response may have in all
    told = append_text(first, TOKENIZER, {int((~first.finished).nonzero()[0]): "5;" * 6})
    with pytest.raises(ValueError, match=f"a text of {longest + 12} tokens so far, .*, and 5 new ones .* 20 positions"):
        gone_on(policy, told, tokens=5, longest=9)


def test_an_engine_that_converses_has_the_defaults_of_the_one_it_asks():
    policy = model()
    engine = in_turns(ModelEngine(policy, TOKENIZER), TASK, TOKENIZER)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    options = {"group_size": 2, "max_new_tokens": 8}
    plain = engine.sample(problems(), generator=generators[0], **options)
    named = engine.sample(problems(), generator=generators[1], temperature=1.0, record_routes=False, **options)
    assert plain.completions == named.completions and any("$" in text for text in plain.completions)


def test_the_calculator_answers_questions_and_judges_the_last_turn():
    problem = replace(TASK.problem(random.Random(0)), prompt="^3+4*5=", answer="0")
    assert TASK.reply(problem, "3+4") == "0;" and TASK.reply(problem, "3+4$0;0*5") == "0;"
    assert TASK.reply(problem, "3+9") == "?;" == TASK.reply(problem, "") == TASK.reply(problem, "3+4$0;hello")
    assert TASK.reply(problem, "3+4$0;!0") is None
    assert [TASK.reward(problem, text) for text in ("3+4$0;0*5$0;!0", "!0", "!1", "3+4$0;", "")] == [1, 1, 0, 0, 0]
    clean = TASK.demonstration(problem, random.Random(0))
    assert clean == "3+4$0;0*5$0;!0" and TASK.reward(problem, clean) == 1
    assert len(clean.replace("0;", "")) + 1 == TASK.max_new_tokens, "what the policy itself must write"


class Scripted:
    """A task whose replies are listed by turn, for one row."""

    name, max_turns = "scripted", 3

    def __init__(self, fails=False):
        self.fails, self.asked = fails, []

    def reply(self, problem, transcript):
        if self.fails:
            raise RuntimeError("the tool is down")
        self.asked.append(transcript)
        return "1;"


@pytest.mark.parametrize("second", [None, ""])
def test_a_conversation_that_has_ended_is_not_taken_up_again(monkeypatch, second):
    ended = begun(model(), record=False)
    ended = replace(ended, finished=torch.ones_like(ended.finished))
    monkeypatch.setattr(
        "moe_rl.rollout.continuing.extend", lambda _, told, **__: replace(told, finished=ended.finished)
    )
    asked = []

    class Task:
        name, max_turns = "fickle", 4

        def reply(self, problem, transcript):
            asked.append(transcript)
            return second if len(asked) in (1, 7) else "1;"  # of 6 responses the first, then the second

    class Ends:
        def sample(self, problems, **_):
            return ended

    whole = in_turns(Ends(), Task(), TOKENIZER).sample(problems(), group_size=2, max_new_tokens=9)
    told = whole.attention_mask.sum(1) - ended.attention_mask.sum(1)
    assert told.tolist() == [0, 2, 6, 6, 6, 6] and len(asked) == 6 + 5 + 4


def test_what_goes_on_ends_at_a_responses_room():
    policy = model()
    first = begun(policy)
    calls = []
    hook = policy.register_forward_pre_hook(lambda *_: calls.append(1))
    whole = gone_on(policy, first, tokens=40, longest=5)
    hook.remove()
    assert len(calls) == 1 and bool((whole.lengths - first.lengths == (~first.finished).long()).all())


def test_a_conversation_has_as_many_turns_as_the_task_says(monkeypatch):
    policy = model()
    rollout = begun(policy, record=False)
    ended = replace(rollout, finished=torch.ones_like(rollout.finished))
    turns = []

    class Ends:
        """An engine each of whose turns ends."""

        def sample(self, problems, **_):
            return ended

    def turn(engine, told, **_):
        turns.append(told)
        return replace(told, finished=torch.ones_like(told.finished))

    monkeypatch.setattr("moe_rl.rollout.continuing.extend", turn)

    def conversed(task, longest=9):
        return in_turns(Ends(), task, TOKENIZER).sample(problems(), group_size=2, max_new_tokens=longest)

    task = Scripted()
    whole = conversed(task)
    assert len(turns) == 2 and all(text.count("1;") >= 2 for text in whole.completions) and len(task.asked) == 12
    with pytest.raises(TaskError, match="scripted, reply: RuntimeError: the tool is down"):
        conversed(Scripted(fails=True))
    with pytest.raises(TaskError, match=r"other, reply: expected a text or None, got \{'role': 'tool'\}; prompt"):
        conversed(SimpleNamespace(name="other", reply=lambda *_: {"role": "tool"}))
    spent = Scripted()
    assert conversed(spent, longest=1) is ended and not spent.asked, "no tokens are left"
