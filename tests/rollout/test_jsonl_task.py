"""One's own data: files of prompts and answers, what verifiers take for right, and every mistake told its place."""

import importlib.util
import json
import random
import sys
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_rl.rollout import Problem, TaskConfig, TaskError, is_held_out, make_task
from moe_rl.rollout.completions import encode_prompts
from moe_rl.rollout.task import as_problem, message_tokens, problems_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_tokenizer(template=None):
    """One token per byte, and a beginning token that it puts before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<s>", "</s>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    from tokenizers.processors import TemplateProcessing

    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>", padding_side="left"
    )
    tokenizer.chat_template = template
    return tokenizer


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path):
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{n}+1=", "answer": n + 1, "note": "x"} for n in range(60)])


def task(path, **options):
    return make_task(TaskConfig("jsonl", {"path": str(path), **options}))


def test_a_file_of_prompts_is_a_task_with_a_held_out_tenth(sums):
    made = task(sums)
    training, held_out = made.problems
    assert len(training) + len(held_out) == 60 and 1 <= len(held_out) <= 14
    assert all(is_held_out(p.prompt) for p in held_out) and not any(is_held_out(p.prompt) for p in training)
    rng = random.Random(0)
    assert {made.problem(rng) for _ in range(500)} == set(training)
    assert {made.problem(rng, held_out=True) for _ in range(200)} == set(held_out)
    problem = Problem("5+1=", "6")
    assert problem in training + held_out
    assert [made.reward(problem, text) for text in ("6", "5+1 is 6.", "7", "")] == [1, 1, 0, 0]
    assert set("0123456789+=^$") == set(made.alphabet)
    assert made.demonstration(problem, rng, 0.0) == "6"
    wrong = sum(made.demonstration(problem, rng, 0.5) != "6" for _ in range(200))
    assert 70 < wrong < 130  # half, but for the chance of drawing the same line
    assert not made.chats


def test_held_out_lines_are_evaluated_without_repeats_and_in_one_order(sums):
    made = task(sums)
    held_out = made.problems[1]
    n = len(held_out)

    def asked(count):
        return problems_of(made, random.Random("held-out"), count, held_out=True)

    assert sorted(p.prompt for p in asked(n)) == sorted(p.prompt for p in held_out) and asked(n) != held_out
    assert asked(2 * n + 1) == asked(n) * 2 + asked(1) and asked(n - 1) == asked(n)[:-1]
    assert asked(n)[0] in held_out and len(problems_of(made, random.Random(0), 500)) == 500, "training ones are drawn"


def test_instruction_and_chat_reach_the_prompt(sums):
    made = task(sums, instruction=" Only the number.", chat=True)
    problem = made.problem(random.Random(0))
    assert problem.prompt.endswith("= Only the number.") and problem.messages == (("user", problem.prompt),)
    assert made.chats


def test_messages_go_through_the_chat_template(tmp_path):
    rows = [
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}?"}],
            "answer": "yes",
        }
        for n in range(60)
    ]
    made = task(write(tmp_path / "chat.jsonl", rows), instruction="!")
    problem = next(p for part in made.problems for p in part if "7?" in p.prompt and "17" not in p.prompt)
    number = problem.messages[1][1].removesuffix("?!")
    assert problem.messages == (("system", "Be brief."), ("user", f"{number}?!"))
    assert problem.prompt == f"system: Be brief.\n\nuser: {number}?!"
    tokenizer = byte_tokenizer(TEMPLATE)
    (ids,), (plain,) = (encode_prompts(tokenizer, [p])[0].tolist() for p in (problem, Problem("a", "")))
    assert tokenizer.decode(ids) == f"<system>Be brief.\n<user>{number}?!\n<bot>"  # no second beginning token
    assert plain == [0, tokenizer("a")["input_ids"][-1]]  # a text begins as the tokenizer wants it
    with pytest.raises(TaskError, match="gives messages and the tokenizer has no chat template"):
        message_tokens(byte_tokenizer(), problem)
    picky = byte_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(TaskError, match=r"chat template refuses the messages of 'system: Be.*no system role"):
        message_tokens(picky, problem)


def test_a_problem_is_hashable_and_says_what_it_asks():
    problem = as_problem((("user", "a"), ("assistant", "b"), ("user", "c")), "d", instruction=" e")
    assert hash(problem) and problem.messages[-1] == ("user", "c e") and problem.messages[1] == ("assistant", "b")


def test_an_answer_that_holds_the_tiny_models_end_token_is_refused(tmp_path):
    path = write(tmp_path / "prices.jsonl", [{"prompt": f"{i}+1=$", "answer": f"${i + 1}"} for i in range(60)])
    made = task(path)
    with pytest.raises(TaskError, match=r"the answer '\$\d+' holds \^ or \$, the first and the last token"):
        _ = made.alphabet
    assert made.problem(random.Random(0)).answer.startswith("$")  # any other model takes it


def test_a_held_out_file_replaces_the_split(tmp_path, sums):
    other = write(tmp_path / "test.jsonl", [{"prompt": "1000+1=", "answer": 1001}])
    training, held_out = task(sums, held_out=other).problems
    assert len(training) == 60 and [p.answer for p in held_out] == ["1001"]
    leak = write(tmp_path / "leak.jsonl", [{"prompt": "7+1=", "answer": 8}, {"prompt": "1000+1=", "answer": 1001}])
    with pytest.raises(TaskError, match=r"1 prompts are in both .*sums.jsonl and .*leak.jsonl, e.g. '7\+1='"):
        _ = task(sums, held_out=leak).problems


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", r"data.jsonl, line 3: not JSON \(Expecting property name.*: \"\{'prompt': 1\}\""),
        ("[1]", r"line 3: expected an object with prompt or messages, and answer; got '\[1\]'"),
        (
            {"question": "a", "answer": "b"},
            "line 3: expected either prompt or messages, got the fields question, answer",
        ),
        ({"prompt": "a", "messages": [], "answer": "b"}, "line 3: expected either prompt or messages"),
        ({"prompt": "a"}, "line 3: answer: expected a text or a number, got None"),
        ({"prompt": "a", "answer": True}, "line 3: answer: expected a text or a number, got True"),
        ({"prompt": "a", "answer": " "}, "line 3: answer: expected a text or a number, got ' '"),  # "" would be right
        ('{"prompt": "a", "answer": NaN}', "line 3: answer: expected a text or a number, got nan"),
        ({"prompt": "", "answer": "b"}, "line 3: prompt: expected a text, got ''"),
        (r'{"prompt": "a\ud83d", "answer": "b"}', "line 3: holds half of a character"),
        ({"prompt": ["a"], "answer": "b"}, r"line 3: prompt: expected a text, got \['a'\]"),
        ({"messages": "hello", "answer": "b"}, "line 3: messages: expected a list of objects"),
        ({"messages": [{"role": "user"}], "answer": "b"}, r"line 3: messages\[0\]: expected role and content"),
        (
            {"messages": [{"role": "assistant", "content": "b"}], "answer": "b"},
            "line 3: messages: the last one is the assistant's",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "b"}, "", line])
    with pytest.raises(TaskError, match=message):
        _ = task(path).problems


def test_a_file_from_an_editor_with_a_mark_and_numbers_of_any_size(tmp_path):
    rows = [*({"prompt": f"{n}+1=", "answer": n + 1} for n in range(60)), {"prompt": "tiny", "answer": 1e-5}]
    path = write(tmp_path / "data.jsonl", rows)
    Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes().replace(b"\n", b"\r\n"))
    problems = [problem for part in task(path).problems for problem in part]
    assert len(problems) == 61 and {p.prompt: p.answer for p in problems}["tiny"] == "0.00001"


def test_files_that_cannot_serve(tmp_path):
    with pytest.raises(TaskError, match=f"there is no file {tmp_path}/none"):
        _ = task(tmp_path / "none").problems
    good = write(tmp_path / "good.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(TaskError, match=f"task.options.held_out: there is no file {tmp_path}/none"):
        _ = task(good, held_out=str(tmp_path / "none")).problems
    with pytest.raises(TaskError, match="is empty; expected a JSON object per line"):
        _ = task(write(tmp_path / "empty.jsonl", ["", " "])).problems
    with pytest.raises(TaskError, match=r"cannot read .*: 'utf-8' codec"):
        (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
        _ = task(tmp_path / "latin.jsonl").problems
    with pytest.raises(TaskError, match=r"of these 1 none is held out\. Give more prompts, or a file"):
        _ = task(write(tmp_path / "one.jsonl", [{"prompt": "b", "answer": "b"}])).problems


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "task.options.path: expected a file"),
        (
            {"verifier": "regex"},
            "task.options.verifier: expected one of exact_match, last_answer, math_verify, got 'regex'",
        ),
        ({"max_new_tokens": 0}, "task.options.max_new_tokens: expected at least 1, got 0"),
        ({"pat": "x"}, "jsonl has no such option; did you mean 'path'"),
        ({"chat": "yes"}, "task.options.chat: expected bool, got 'yes'"),
        ({"fields": "tests"}, "task.options.fields: expected a list of names other than prompt, messages and answer"),
        ({"fields": ["tests"]}, "task.options.fields: the verifier last_answer looks at the answer alone"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(TaskError, match=message):
        task("x", **options) if "path" not in options else make_task(TaskConfig("jsonl", options))


def test_a_chat_that_is_written_in_two_ways_is_not_trained_on_and_held_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}], "answer": "1"}\n')
    options = {"path": str(tmp_path / "a.jsonl"), "held_out": str(tmp_path / "b.jsonl"), "chat": True}
    with pytest.raises(TaskError, match=r"1 prompts are in both .*a\.jsonl and .*b\.jsonl, e\.g\. 'x'"):
        _ = make_task(TaskConfig("jsonl", options)).problems


# -- optional packages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "package", "message"),
    [
        ("jsonl", {"verifier": "math_verify"}, "math_verify", r"pip install '.\[math-verify\]'"),
        ("reasoning_gym", {}, "reasoning_gym", r"pip install '.\[reasoning-gym\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_installation(monkeypatch, sums, name, options, package, message):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a))
    with pytest.raises(TaskError, match=message):
        made = make_task(TaskConfig(name, options | ({"path": sums} if name == "jsonl" else {})))
        made.reward(Problem("1+1=", "2"), "2")


@pytest.fixture
def fake_reasoning_gym(tmp_path, monkeypatch):
    """A package with the four names that are used of reasoning-gym."""
    folder = tmp_path / "reasoning_gym"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        textwrap.dedent("""
            class Dataset:
                def __init__(self, size, seed, low=0): self.seed, self.low = seed, low
                def __getitem__(self, i):
                    return {"question": f"{i}+{self.low}+{self.seed}?", "answer": None if self.low == 8 else i}
                def score_answer(self, answer, entry):
                    if answer == "crash": raise RuntimeError
                    if self.low == 7: import no_such_package
                    return 1.0 if answer == str(entry["answer"]) else 0.25
            def create_dataset(name, **config): return Dataset(**config)
        """)
    )
    (folder / "factory.py").write_text("DATASETS = {'sums': None}")
    (folder / "utils.py").write_text(
        "def extract_answer(text): return text.split('<answer>')[-1].split('</')[0] if '<answer>' in text else None"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def test_reasoning_gym_by_its_interface(fake_reasoning_gym):
    def gym(**options):
        return make_task(TaskConfig("reasoning_gym", options))

    made = gym(dataset="sums", config={"low": 3}, seed=5, instruction=" Go.", chat=True, max_new_tokens=9)
    problem = made.problem(random.Random(0))
    assert problem.prompt == f"{problem.answer}+3+5? Go." and problem.messages == (("user", problem.prompt),)
    answers = [problem.answer, f"so <answer>{problem.answer}</answer>", "no", "crash"]
    assert [made.reward(problem, text) for text in answers] == [1.0, 1.0, 0.25, 0.0]
    assert made.chats and made.max_new_tokens == 9
    again = gym(dataset="sums", config={"low": 3}, seed=5)
    assert again.reward(problem, problem.answer) == 1.0, "a question that an earlier process drew"
    with pytest.raises(TaskError, match="is none of its questions"):
        again.reward(Problem("1+1=", "2"), "2")
    with pytest.raises(TaskError, match="the scorer of sums needs a package: No module named 'no_such_package'"):
        gym(dataset="sums", config={"low": 7}).reward(problem, "2")
    scored = gym(dataset="sums", config={"low": 8})
    question = scored.problem(random.Random(0))
    with pytest.raises(TaskError, match="sums gives questions without answers: there is nothing"):
        scored.demonstration(question, random.Random(0))
    for options, message in (
        ({"dataset": "sum"}, "task.options.dataset: unknown 'sum'; did you mean 'sums'"),
        ({"dataset": "sums", "config": {"high": 1}}, "task.options.config: sums cannot be made with {'high': 1}"),
    ):
        with pytest.raises(TaskError, match=message):
            gym(**options).problem(random.Random(0))


if importlib.util.find_spec("reasoning_gym"):

    def test_the_real_reasoning_gym():
        made = make_task(TaskConfig("reasoning_gym", {"dataset": "chain_sum", "config": {"max_terms": 3}}))
        problem = made.problem(random.Random(0))
        assert made.reward(problem, f"<answer>{problem.answer}</answer>") == 1.0 > made.reward(problem, "no idea")
