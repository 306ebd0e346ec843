"""What the verifiers take for right, and math-verify in a process of its own."""

import importlib.util
import os
import signal
import textwrap
import time
from unittest.mock import Mock

import pytest

from moe_rl.rollout import TaskError
from moe_rl.rollout.verifiers import MathVerify, exact_match, last_answer, last_boxed


@pytest.mark.parametrize(
    ("answer", "completion", "exact", "last"),
    [
        ("12", "12", True, True),
        ("12", " 12. ", True, True),
        ("12", "It is 12", False, True),
        ("12", "12 or 13", False, False),
        ("12", "the 13th, so \\boxed{12} of 40", False, True),
        ("12", "\\boxed{12} no, \\boxed{13}", False, False),
        ("12", "", False, False),
        ("-3", "5 - 8 = -3", False, True),
        ("-3", "\N{MINUS SIGN}3", True, True),
        ("3", "It is \N{MINUS SIGN}3", False, False),
        ("1234.5", "$1,234.50", False, True),
        ("18", "a change of -$18", False, False),
        ("-$18", "so \\boxed{-\\$18.00}", False, True),
        ("1000", "\\boxed{1{,}000}", False, True),
        ("50%", "\\boxed{50\\%}", False, True),
        ("0.5", ".5", False, True),
        ("12", "x12", False, False),  # part of a word is no number
        ("0.5", "EUR12.50", False, False),  # nor is the tail of one
        ("1.2", "See version 1.2.3", False, True),
        ("-0.5", "so x=-.5", False, True),
        ("1234", "at (1,2345)", False, False),  # two numbers, not 1,234 and a digit
        ("2345", "at (1,2345)", False, True),
        ("1", "about 1e5", False, False),  # its exponent is part of it
        ("0.0015", "1.5E-3 m", False, True),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", False, True),
        ("\\frac{1}{2}", "\\boxed{0.5}", False, False),  # mathematics: math_verify
        ("Paris", "I think\nparis.", False, True),
        ("Paris", "PARIS", True, True),
        ("12", "\\boxed{12", False, True),  # never closed: its last number
    ],
)
def test_verifiers(answer, completion, exact, last):
    assert (exact_match(answer, completion), last_answer(answer, completion)) == (exact, last)


def test_last_boxed_balances_braces():
    assert last_boxed("\\boxed{a} \\boxed {b{c}{d}} \\boxed{e") == "b{c}{d}"
    assert last_boxed("boxed{a}") is None


@pytest.mark.parametrize("text", ["\\boxed{", "\\boxed{{", "\\boxed {}", "\\boxed", "{", "1,", "1.", "a\n"])
def test_the_last_answer_of_a_long_completion_is_found_in_time_linear_in_it(text):
    began = time.process_time()
    last_answer("12", text * 20_000)
    assert time.process_time() - began < 10, "a quadratic one takes over a minute"


@pytest.fixture
def fake_math_verify(tmp_path, monkeypatch):
    """A package with math-verify's two functions: equal text is equal, `hang` never ends, `die` ends the process."""
    (tmp_path / "math_verify.py").write_text(
        textwrap.dedent("""
            import os, time
            def parse(text, parsing_timeout):
                assert parsing_timeout is None
                if "hang" in text: time.sleep(60)
                if "die" in text: os._exit(1)
                if "raise" in text: raise ValueError(text)
                return [text.replace("\\\\boxed{", "").rstrip("}")] if "?" not in text else []
            def verify(gold, target, timeout_seconds):
                assert timeout_seconds is None
                return gold == target
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_math_verify_in_a_process_of_its_own(fake_math_verify, monkeypatch):
    monkeypatch.setattr(MathVerify, "SECONDS", 0.5)
    verify = MathVerify()
    assert verify("12", "12") and not verify("12", "13")
    process = verify.process
    assert not verify("12", "raise") and verify.process is process
    assert not verify("12", "hang") and process.poll() is not None, "a completion on which it never ends is wrong"
    assert process.stdin.closed and process.stdout.closed, "a run may meet thousands of such"
    assert verify("12", "\\boxed{12}") and not verify("12", "die") and verify("1\n2", "1\n2")
    with pytest.raises(TaskError, match=r"cannot read the answer '\?'"):
        verify("?", "12")
    assert verify("12", "12")
    with pytest.raises(TaskError, match=r"cannot read the answer 'hang' in 0\.5 seconds"):
        verify("hang", "12")
    with pytest.raises(TaskError, match="cannot read the answer 'raise'"):
        verify("raise", "12")
    assert verify("12", "12")
    interrupted = Mock(side_effect=KeyboardInterrupt)
    for pipe, name in (("stdout", "readline"), ("stdin", "flush")):  # after a question, and within it
        with monkeypatch.context() as patch:
            patch.setattr(getattr(verify.process, pipe), name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                verify("12", "13")
        assert verify("12", "12"), "not the answer to the question before"
    os.kill(verify.process.pid, signal.SIGSTOP)
    assert not verify("12", "13" * 10**6), "a question that no frozen process reads to its end"
    assert verify("12", "12")
    for _ in range(4):  # its end may come before the question or after it
        verify.process.kill()
        assert verify("12", "12"), "started anew"
    process = verify.process
    del verify
    assert process.wait(10) is not None, "it ends with the one who asked"


if importlib.util.find_spec("math_verify"):

    @pytest.mark.parametrize(
        ("answer", "completion", "right"),
        [("1/2", "so \\boxed{0.5}", True), ("x^2+1", "$1+x^2$", True), ("12", "12 or 13", False), ("12", "", False)],
    )
    def test_the_real_math_verify(answer, completion, right):
        assert MathVerify()(answer, completion) == right
