"""A command that is interrupted, or fails at a file, is one message; whether it goes on is said."""

import errno
import signal
from contextlib import suppress

import pytest

from moe_rl.cli import VERBS, main


@pytest.mark.parametrize(("name", "goes_on"), [("run", True), ("study", True), ("check-routes", False)])
def test_an_interrupted_command_says_whether_it_goes_on(name, goes_on, capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, name, interrupted)
    with pytest.raises(SystemExit, match="130"):
        main([name])
    assert ("goes on from the last checkpoints" in capsys.readouterr().err) == goes_on


@pytest.mark.parametrize(("command", "goes_on"), [("figures", False), ("study", True)])
def test_only_a_command_that_goes_on_is_said_to(monkeypatch, capsys, command, goes_on):
    def refused(_):
        raise OSError(errno.EROFS, "Read-only file system", "runs/q/figures")

    monkeypatch.setitem(VERBS, command, refused)
    with pytest.raises(SystemExit) as stop:
        main([command])
    said = capsys.readouterr().err
    assert stop.value.code == 1 and said.startswith("moe-rl: error: Read-only file system: runs/q/figures")
    assert ("the same command goes on" in said) == goes_on


def test_an_interrupt_that_a_library_took_for_a_missing_package_is_one(monkeypatch, capsys):
    def half_imported(_):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setitem(VERBS, "drift", half_imported)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stop:
            main(["drift"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and capsys.readouterr().err == "moe-rl: error: interrupted\n"
