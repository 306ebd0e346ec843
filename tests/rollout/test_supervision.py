"""Step rewards on their tokens, several rewards, demonstrations as a rollout."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from moe_rl.policy.tiny import char_tokenizer, demonstration_batch
from moe_rl.rollout import Problem, Rollout, TaskError, demonstrate, named_rewards, score, step_rewards
from moe_rl.rollout.character_tasks import ModChain


class Pieces:
    """Token i is PIECES[i]: some of several characters, one of none."""

    PIECES = ("", "a", "bc", "def", "$")

    def decode(self, ids, **_):
        return "".join(self.PIECES[i] for i in ids)


class Steps:
    name = "steps"

    def __init__(self, found):
        self.found = found

    def step_rewards(self, problem, completion):
        return self.found


def rollout(ids, completion):
    """One row behind a prompt of two tokens."""
    row = torch.tensor([[1, 1, *ids]])
    mask = torch.ones_like(row, dtype=torch.bool)
    answer = mask.clone()
    answer[:, :2] = False
    return Rollout(
        row, mask, answer, torch.zeros(row.shape), torch.zeros(1), mask[:, 0], 1, [Problem("", "")], [completion]
    )


def test_a_step_ends_on_the_token_that_reaches_its_last_character():
    """Tokens a|bc|def|$ hold characters 1, 2-3, 4-6: ends at 1, 3, 5 fall on tokens 0, 1, 2 of the completion."""
    made = rollout([1, 2, 3, 4], "abcdef")
    rewards, ends = step_rewards(Steps([(1, 0.5), (3, 1.0), (5, 2.0)]), Pieces(), made)
    assert rewards.tolist() == [[0, 0, 0.5, 1.0, 2.0, 0]]
    assert ends.tolist() == [[False, False, True, True, True, False]]


def test_steps_that_end_in_one_token_add_up_and_a_reward_of_zero_is_still_a_step():
    made = rollout([1, 2, 3, 4], "abcdef")
    rewards, ends = step_rewards(Steps([(1, 0.0), (4, 1.0), (6, 2.0)]), Pieces(), made)
    assert rewards.tolist() == [[0, 0, 0.0, 0, 3.0, 0]] and ends[0].tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize("pieces", [("a\ufffd", "a\ufffd\ufffd"), ("a\ufffd", "a\ufffd")])
def test_a_step_that_ends_with_a_character_of_several_tokens_ends_with_the_last_of_them(pieces):
    """Until it is whole, its first tokens decode to a replacement character each (byte fallback, as Mixtral's), or to
    one for all of them (byte-level)."""
    texts = ("", "a", *pieces, "a\u5b57", "a\u5b57;", "a\u5b57;b")
    tokenizer = SimpleNamespace(decode=lambda ids, **_: texts[len(ids)])
    made = rollout([1] * 6, texts[-1])
    _, ends = step_rewards(Steps([(2, 1.0), (3, 1.0)]), tokenizer, made)
    assert ends[0, 2:].tolist() == [False, False, False, True, True, False]


def test_a_step_after_a_reply_of_the_task_ends_on_its_own_token():
    """In several turns the tokens of the reply (bc) are of the completion's text, and no completion tokens."""
    made = rollout([1, 2, 1, 3, 4], "abcadef")
    made.completion_mask[0, 3] = False
    _, ends = step_rewards(Steps([(1, 0.5), (3, 1.0), (7, 2.0)]), Pieces(), made)
    assert ends[0].tolist() == [False, False, True, True, False, True, False]


def test_step_rewards_and_several_rewards_have_the_verifiers_time():
    slow = SimpleNamespace(name="slow", step_rewards=lambda *_: time.sleep(9), rewards=lambda *_: time.sleep(9))
    with pytest.raises(TaskError, match=r"slow, step_rewards: did not return within 0\.01 seconds"):
        step_rewards(slow, Pieces(), rollout([1], "a"), seconds=0.01)
    with pytest.raises(TaskError, match=r"slow, rewards: did not return within 0\.01 seconds"):
        named_rewards(slow, rollout([1], "a"), seconds=0.01)


@pytest.mark.parametrize("end", [0, 7])
def test_a_step_outside_the_completion_is_the_tasks_mistake(end):
    with pytest.raises(
        TaskError, match=f"steps, step_rewards: a step ends at character {end} of the 6.*completion 'abcdef'"
    ):
        step_rewards(Steps([(end, 1.0)]), Pieces(), rollout([1, 2, 3, 4], "abcdef"))


def test_mod_chain_rewards_its_steps():
    """^3+4*5-6= is 3+4=0;0*5=0;0-6=1. modulo 7. A slip is not forgiven later; what is left open is no step done."""
    task, problem = ModChain(steps=3), Problem("^3+4*5-6=", "1")
    assert task.step_rewards(problem, "3+4=0;0*5=0;0-6=1.") == [(6, 1.0), (12, 1.0), (18, 1.0)]
    assert task.step_rewards(problem, "3+4=1;1*5=5;5-6=6.") == [(6, 0.0), (12, 0.0), (18, 0.0)]
    assert task.step_rewards(problem, "3+4=0;0*5=0") == [(6, 1.0), (11, 0.0)]
    assert task.step_rewards(problem, "") == [] and task.step_rewards(problem, ";;") == [(1, 0.0), (2, 0.0)]
    assert task.step_rewards(problem, "3+4=0;0*5=0;0-6=1.;9") == [(6, 1.0), (12, 1.0), (19, 0.0), (20, 0.0)]
    assert task.rewards(problem, "3+4=0;0*5=0;0-6=2.") == {"correct": 0.0, "format": 1.0}
    assert task.rewards(problem, "3+4=0;0*5=0;0-6=1.") == {"correct": 1.0, "format": 1.0}
    assert task.rewards(problem, "0-6=1.") == {"correct": 0.0, "format": 0.0}


def test_rewards_have_one_name_each():
    class Two:
        name = "two"

        def rewards(self, problem, completion):
            return {"a": 1.0, "b": 0.5} if completion else {"a": 1.0}

    names, table = named_rewards(Two(), rollout([1], "a"))
    assert names == ["a", "b"] and table.tolist() == [[1.0, 0.5]]
    both = rollout([1], "a")
    both.problems.append(Problem("", ""))
    both.completions.append("")
    with pytest.raises(
        TaskError, match=r"two, rewards: expected \['a', 'b'\] for every completion, got \['a'\].*completion ''"
    ):
        named_rewards(Two(), both)
    turned = SimpleNamespace(
        name="turned", rewards=lambda _, text: {"a": 1.0, "b": 0.5} if text else {"b": 0.5, "a": 1.0}
    )
    assert named_rewards(turned, both)[1].tolist() == [[1.0, 0.5], [1.0, 0.5]], "of any order"
    with pytest.raises(TaskError, match=r"task spread, rewards: rows have a reward_std already; rename 'std'"):
        named_rewards(SimpleNamespace(name="spread", rewards=lambda *_: {"a": 1.0, "std": 0.5}), both)
    with pytest.raises(TaskError, match="none, rewards: expected one or more rewards"):
        named_rewards(SimpleNamespace(name="none", rewards=lambda *_: {}), both)


def test_what_is_not_of_the_kind_that_is_asked_for_names_the_task():
    def task(**parts):
        return SimpleNamespace(name="mine", **parts)

    with pytest.raises(TaskError, match="mine, demonstration: expected a text, got None; prompt '1'"):
        demonstrate(task(demonstration=lambda *_: None), None, [Problem("1", "")], random.Random(0))
    with pytest.raises(TaskError, match=r"mine, step_rewards: TypeError: .*; prompt"):
        step_rewards(task(step_rewards=lambda *_: [("2", 1.0)]), Pieces(), rollout([1, 2], "abc"))


def test_demonstrations_are_right_answers_in_the_form_of_a_rollout():
    task = ModChain(steps=2)
    tokenizer = char_tokenizer(task.alphabet)
    rng = random.Random(0)
    problems = [task.problem(rng) for _ in range(5)]
    made = score(task, demonstrate(task, tokenizer, problems, rng))
    assert made.rewards.tolist() == [1.0] * 5 and made.group_size == 1
    for row, (problem, text) in enumerate(zip(problems, made.completions, strict=True)):
        assert tokenizer.decode(made.input_ids[row][made.attention_mask[row]]) == problem.prompt + text + "$"
        assert tokenizer.decode(made.input_ids[row][made.completion_mask[row]]) == text + "$"


def test_an_answer_begins_where_its_prompt_ends_whatever_the_tokenizer_puts_before_a_text():
    """As Mixtral's or Llama's does: sampling never meets a beginning token there."""
    task = ModChain(steps=2)
    tokenizer = char_tokenizer(task.alphabet + "<")
    begin = tokenizer.convert_tokens_to_ids("<")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="< $A", special_tokens=[("<", begin)])
    problem = task.problem(random.Random(0))
    made = demonstrate(task, tokenizer, [problem], random.Random(0))
    assert tokenizer.decode(made.input_ids[0]) == f"<{problem.prompt}{made.completions[0]}$"
    ids, _, labels = demonstration_batch(tokenizer, [problem.prompt], made.completions)
    assert torch.equal(ids, made.input_ids) and int((labels >= 0).sum()) == len(made.completions[0]) + 1
    tokenizer.eos_token = None
    with pytest.raises(TaskError, match=r"the tokenizer has no end token.*set tokenizer\.eos_token"):
        demonstrate(task, tokenizer, [problem], random.Random(0))
    with pytest.raises(TaskError, match="without, demonstration: AttributeError"):
        demonstrate(SimpleNamespace(name="without"), tokenizer, [problem], random.Random(0))
