import contextlib
import random
import re
import signal
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from moe_rl.policy.tiny import char_tokenizer, demonstration_batch
from moe_rl.rollout import TASKS, Problem, Task, TaskConfig, TaskError, VerifiableTask, is_held_out, make_task
from moe_rl.rollout.completions import encode_prompts
from moe_rl.rollout.task import problems_of, user_code

CHARACTER_TASKS = sorted(set(TASKS) - {"jsonl", "reasoning_gym"})  # the others need a file or a package
CHAIN = make_task(TaskConfig("mod_chain"))
# From left to right, mod 7: 3+4=7=0; 0*5=0; 0-6=-6=1; 1+2=3.
PROBLEM = Problem("^3+4*5-6+2=", "3")
RIGHT = "3+4=0;0*5=0;0-6=1;1+2=3."


def test_mod_chain_spells_out_the_chain():
    assert CHAIN.demonstration(PROBLEM, random.Random(0), 0.0) == RIGHT
    assert CHAIN.reward(PROBLEM, RIGHT) == 1.0
    assert CHAIN.max_new_tokens == len(RIGHT) + 1  # the end token


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "3",
        "3+4=0;0*5=0;0-6=1;1+2=4.",  # wrong digit
        "3+4=0;0*5=0;0-6=1;1+2=3",  # no full stop
        "3+4=0;0*5=0;0-6=1;1+2=3.$",  # an end token that is not the last one
        "3+4=0;0*5=0;0-6=1;1+2=3..",
        "3+4=0;0*5=0;1+2=3.",  # a step short
        "3+4=0;0*5=0;0-6=1;0-6=1;1+2=3.",  # a step too many
        "3+4=0;0*5=0;0-6=1;1+2=3.\n",
        "^3+4=0;0*5=0;0-6=1;1+2=3.",
        "3+4=0;0*5=0;0-6=1;1+2=<pad>3.",
        "3+4=7;0*5=0;0-6=1;1+2=3.",  # 7 is no digit modulo 7
        "3+4=0;0*5=0;0-6=1;1/2=3.",
        "3+4=0;0*5=0;0-6=1;1+2=３.",  # a digit of another script
    ],
)
def test_mod_chain_refuses_malformed_or_wrong_answers(completion):
    assert CHAIN.reward(PROBLEM, completion) == 0.0


def test_mod_chain_looks_at_form_and_final_digit_only():
    assert CHAIN.reward(PROBLEM, "5+5=5;5*5=5;5-5=5;5+5=3.") == 1.0


@given(st.integers(0, 10**9), st.floats(0, 1))
def test_noisy_chains_are_wellformed_and_go_on_from_their_own_results(seed, noise):
    rng = random.Random(seed)
    problem = CHAIN.problem(rng)
    chain = CHAIN.demonstration(problem, rng, noise)
    steps = [re.fullmatch(r"(\d)([+*-])(\d)=(\d)", part).groups() for part in chain[:-1].split(";")]
    assert problem.prompt == "^" + steps[0][0] + "".join(op + b for _, op, b, _ in steps) + "="
    assert [a for a, *_ in steps[1:]] == [result for *_, result in steps[:-1]]
    assert CHAIN.reward(problem, chain) == float(steps[-1][-1] == problem.answer)


def test_noise_is_the_share_of_wrong_results():
    # 2,000 chains x 4 steps at 0.2: 1,600 expected, standard deviation sqrt(8000 * .2 * .8) = 36.
    rng = random.Random(0)
    wrong = 0
    for _ in range(2000):
        problem = CHAIN.problem(rng)
        for a, op, b, result in re.findall(r"(\d)([+*-])(\d)=(\d)", CHAIN.demonstration(problem, rng, 0.2)):
            wrong += eval(f"({a}{op}{b})%7") != int(result)
    assert abs(wrong - 1600) < 4 * 36


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("copy", "^hgfa=", "hgfa"),
        ("reverse", "^hgfa=", "afgh"),
        ("sort", "^hgfa=", "afgh"),
        ("parity", "^1011=", "1"),
        ("parity", "^1001=", "0"),
        ("add", "^27+985=", "1012"),
    ],
)
def test_string_tasks(name, prompt, answer):
    task = make_task(TaskConfig(name))
    assert task.answer(prompt[1:-1]) == answer
    problem = Problem(prompt, answer)
    assert [task.reward(problem, text) for text in (answer, answer + "$", answer[:-1], "")] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", CHARACTER_TASKS)
def test_every_task_keeps_its_promises(name):
    task = make_task(TaskConfig(name))
    assert isinstance(task, Task) and task.name == name
    rng = random.Random(1)
    for _ in range(200):
        problem = task.problem(rng)
        right = task.demonstration(problem, rng, 0.0)
        assert task.reward(problem, right) == 1.0
        noisy = task.demonstration(problem, rng, 1.0)
        assert set(problem.prompt + right + noisy + "$") <= set(task.alphabet)
        if hasattr(task, "reply"):  # demonstrations hold the tool's text, and two slips may cancel out
            assert task.reward(problem, noisy) == float(noisy[-1] == problem.answer)
            continue
        assert max(len(right), len(noisy)) + 1 <= task.max_new_tokens
        assert task.reward(problem, noisy) == float(name == "mod_chain" and noisy[-2] == problem.answer)


@pytest.mark.parametrize("name", CHARACTER_TASKS)
def test_training_and_held_out_prompts_never_meet(name):
    task = make_task(TaskConfig(name))
    rng = random.Random(0)
    train = {task.problem(rng).prompt for _ in range(1000)}
    held_out = {task.problem(rng, held_out=True).prompt for _ in range(300)}
    assert train.isdisjoint(held_out)
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


def test_problems_come_from_the_generator_alone():
    draws = [[CHAIN.problem(random.Random(seed)) for _ in range(3)] for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_a_task_without_a_second_split_says_so():
    task = make_task(TaskConfig("copy", {"length": 1, "symbols": "ab"}))
    wanted = not is_held_out("^a=")
    with pytest.raises(TaskError, match=r"Copy: no held-out prompt .* make its options larger"):
        task.problem(random.Random(0), held_out=wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig("mod_chian"), "unknown task 'mod_chian'; did you mean 'mod_chain'"),
        (TaskConfig("mod_chain", {"step": 3}), "task.options.step: mod_chain has no such option; did you mean 'steps'"),
        (TaskConfig("mod_chain", {True: 3}), "task.options.True: mod_chain has no such option; known: modulus"),
        (TaskConfig("mod_chain", {"steps": "3"}), "task.options.steps: expected int, got '3'"),
        (TaskConfig("mod_chain", {"steps": True}), "task.options.steps: expected int, got True"),
        (TaskConfig("mod_chain", {"steps": 0}), "task.options.steps: expected at least 1, got 0"),
        (TaskConfig("mod_chain", {"modulus": 11}), "task.options.modulus: expected between 2 and 10"),
        (TaskConfig("mod_chain", {"operators": "/"}), "task.options.operators: expected some of"),
        (TaskConfig("copy", {"symbols": "a$"}), "task.options.symbols: expected 2 or more distinct"),
        (TaskConfig("parity", {"symbols": "ab"}), "parity has no such option"),
        (TaskConfig("no_such_package.tasks:Thing"), "cannot import 'no_such_package.tasks'"),
        (TaskConfig("no/such/file.py:Thing"), "there is no file .*no/such/file.py"),
        (TaskConfig("moe_rl.rollout.character_tasks:ModChian"), "no class 'ModChian'; did you mean 'ModChain'"),
        (TaskConfig("collections:OrderedDict"), "collections:OrderedDict lacks name, alphabet"),
    ],
)
def test_bad_configs_name_the_field_and_the_remedy(config, message):
    with pytest.raises(TaskError, match=message):
        make_task(config)


OWN = """
    from __future__ import annotations
    from dataclasses import dataclass
    from moe_rl.rollout import Problem, VerifiableTask

    @dataclass(frozen=True)
    class Double(VerifiableTask):
        below: int = 1000
        name, alphabet, max_new_tokens = "double", "0123456789=^$", 5

        def draw(self, rng):
            n = rng.randrange(self.below)
            return Problem(f"^{n}=", str(2 * n))

        def reward(self, problem, completion):
            return float(completion == problem.answer)
"""


def test_a_task_of_ones_own_from_a_file(tmp_path):
    file = tmp_path / "random.py"  # hides nothing
    file.write_text(textwrap.dedent(OWN))
    task = make_task(TaskConfig(f"{file}:Double", {"below": 100}))
    problem = task.problem(random.Random(0))
    assert isinstance(task, VerifiableTask) and isinstance(task, Task)
    assert task.reward(problem, str(2 * int(problem.prompt[1:-1]))) == 1.0
    with pytest.raises(TaskError, match=r"task.options.below: expected int, got 'x'"):
        make_task(TaskConfig(f"{file}:Double", {"below": "x"}))
    own = textwrap.dedent(OWN).replace("below: int = ", "where: 'Path | None' = None\n    below: int = ")
    file.write_text(own)  # a type that is not imported when it runs
    assert make_task(TaskConfig(f"{file}:Double", {"below": 7})).below == 7
    with pytest.raises(TaskError, match="did you mean 'below'"):
        make_task(TaskConfig(f"{file}:Double", {"belov": 7}))


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ('"double", 5, 5', "Double.alphabet: expected a text of all its characters, got 5"),
        ('"double", ["0", "1"], 5', "Double.alphabet: expected a text"),
        ('"double", "0123456789=^$", "5"', "Double.max_new_tokens: expected a whole number above 0, got '5'"),
        ('"double", "0123456789=^$", 0', "Double.max_new_tokens: expected a whole number above 0, got 0"),
        ('"double", property(lambda self: 1 / 0), 5', None),  # is not evaluated: it may read a file
    ],
)
def test_parts_of_the_wrong_type_are_named(tmp_path, parts, error):
    """They ended in tracebacks, or only when the run had begun."""
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN).replace('"double", "0123456789=^$", 5', parts))
    with pytest.raises(TaskError, match=error) if error else contextlib.nullcontext():
        make_task(TaskConfig(f"{file}:Double"))


@pytest.mark.parametrize(("code", "error"), [("1 / 0", "ZeroDivisionError"), ("raise SystemExit", "SystemExit")])
def test_a_file_that_fails_is_named(tmp_path, code, error):
    """A script that ends its process, too: the command would have ended without a word, as if all had gone well."""
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises(TaskError, match=rf"cannot import .*broken.py.*{error}"):
        make_task(TaskConfig(f"{file}:Double"))


def test_an_error_in_code_of_ones_own_is_told_with_its_line(tmp_path):
    """The last one in one's own file, not that of the library which it calls."""
    file = tmp_path / "own.py"
    own = textwrap.dedent(OWN).replace("completion ==", "parsed(completion) ==")
    file.write_text(own + "\n\ndef parsed(text):\n    import json\n    return json.loads(text)\n")
    task, line = make_task(TaskConfig(f"{file}:Double")), len(file.read_text().splitlines())
    said = rf"JSONDecodeError: [^\n]* \({re.escape(str(file))}, line {line}\)$"
    with pytest.raises(TaskError, match=said), user_code(task, "reward"):
        task.reward(PROBLEM, "")
    with pytest.raises(TaskError, match=r"AttributeError: [^(\n]*$"), user_code(CHAIN, "demonstration"):
        CHAIN.demonstration(None, random.Random(0))


def test_a_text_that_the_tokenizer_has_no_tokens_for_is_a_mistake_of_the_task():
    tokenizer = char_tokenizer("01+=^$")
    assert encode_prompts(tokenizer, [Problem("^0+1=", "1")])[0].shape == (1, 5)
    with pytest.raises(TaskError, match=r"cannot encode '\^0-a='.*: it lacks '-', 'a'; .* the task's `alphabet`"):
        encode_prompts(tokenizer, [Problem("^0+1=", "1"), Problem("^0-a=", "1")])
    with pytest.raises(TaskError, match=r"cannot encode '7\$' .*: it lacks '7'"):
        demonstration_batch(tokenizer, ["^0+1=", "^1+1="], ["1", "7"])


@pytest.mark.parametrize("given", [None, ("^1+1=", "2"), {"prompt": "^1+1=", "answer": "2"}, Problem("", "2")])
def test_what_is_no_problem_is_said_with_the_task(given):
    if isinstance(given, Problem):
        object.__setattr__(given, "prompt", 11)

    class Sums:
        name, alphabet, max_new_tokens = "sums", "0123456789+=^$", 3

        def problem(self, rng, held_out=False):
            return given

    with pytest.raises(TaskError, match=r"task sums, problem: expected a Problem whose prompt is a text, got .*"):
        problems_of(Sums(), random.Random(0), 2)


def test_a_prompt_is_open_where_the_tokenizer_ends_every_text():
    tokenizer = char_tokenizer("01+=^$")
    end = [("end", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="end $A end", special_tokens=end)
    assert tokenizer.decode(tokenizer("0+1=")["input_ids"]) == "$0+1=$"
    (prompt,), _ = encode_prompts(tokenizer, [Problem("0+1=", "1")])
    assert tokenizer.decode(prompt) == "$0+1=", "a response behind an end token answers nothing"
    (own,), _ = encode_prompts(tokenizer, [Problem("0$", "1")])
    assert tokenizer.decode(own) == "$0$", "the one that stands in the prompt stays"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="end $A", special_tokens=end)
    assert encode_prompts(tokenizer, [Problem("0$", "1")])[0].tolist() == [own.tolist()]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="limits are set by Unix timers")
def test_a_time_limit_stops_code_that_catches_exceptions_and_leaves_the_timer_of_its_caller():
    def endless():
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            with contextlib.suppress(Exception):  # as verifiers do around parsers
                time.sleep(0.01)

    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    try:
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        late = pytest.raises(TaskError, match=r"did not return within 0\.1 seconds")
        with late, user_code(CHAIN, "reward", seconds=0.1):
            endless()
        assert time.monotonic() - started < 20 and not rang
        while not rang and time.monotonic() - started < 20:
            time.sleep(0.01)
        assert rang and rang[0] - started >= 0.39
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="limits are set by Unix timers")
@pytest.mark.parametrize(("starts", "outcome"), [(True, pytest.raises(TaskError)), (False, contextlib.nullcontext())])
def test_a_time_that_is_up_just_as_code_starts_or_ends_is_no_error_of_another_kind(monkeypatch, starts, outcome):
    before, timer = signal.getsignal(signal.SIGALRM), signal.setitimer

    def just_now(which, seconds, *interval):
        if bool(seconds) == starts:
            signal.raise_signal(signal.SIGALRM)
        return timer(which, seconds, *interval)

    monkeypatch.setattr(signal, "setitimer", just_now)
    with outcome, user_code(CHAIN, "reward", seconds=60):
        pass
    assert signal.getsignal(signal.SIGALRM) == before and timer(signal.ITIMER_REAL, 0) == (0.0, 0.0)
