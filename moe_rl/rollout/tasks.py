"""The registry of tasks by name, and the loading of task classes of your own.

A class of your own is named by its module or file, so that every process finds it:

    task: {name: my_package.tasks:Countdown, options: {numbers: 4}}
    task: {name: tasks/countdown.py:Countdown}

Your own prompts and answers need no class:

    task: {name: jsonl, options: {path: questions.jsonl}}

`moe_rl.rollout.task.Task` lists what a task must have. In Python, any object that has these parts is a task.
"""

import dataclasses
import inspect
import numbers
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_rl.names import load_object, nearest
from moe_rl.objectives.bounds import Positive
from moe_rl.rollout.character_tasks import Calculator, ModChain
from moe_rl.rollout.gym_task import ReasoningGym
from moe_rl.rollout.jsonl_task import JsonLines
from moe_rl.rollout.string_tasks import Add, Copy, Parity, Reverse, Sort
from moe_rl.rollout.task import TaskError

TASKS: Mapping[str, type] = {
    cls.name: cls for cls in (ModChain, Calculator, Copy, Reverse, Sort, Parity, Add, JsonLines, ReasoningGym)
}
"""The task classes that come with the package, by name."""

REQUIRED = ("name", "alphabet", "max_new_tokens", "problem", "reward")


@dataclass(frozen=True)
class TaskConfig:
    """Settings of the task: its name and its options."""

    name: str = "mod_chain"
    """A name in `TASKS`, or a class of your own: `package.module:Class` or `path/to/file.py:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task's class."""
    verifier_seconds: Positive | None = 60.0
    """How long the verifier may take for one completion before the run stops; null: no limit."""


def make_task(config: TaskConfig) -> Any:
    """Build the task that a config names; the result satisfies `moe_rl.rollout.Task`.

    Raises:
        TaskError: no such task, module, file or class; an unknown option (with the nearest match); an option
            of the wrong type or out of range; a class that lacks a part of `Task`,
            or has one of the wrong type.

    >>> make_task(TaskConfig("mod_chain", {"steps": 2})).max_new_tokens
    13
    """
    if ":" in config.name:
        cls = load_object(config.name, "task.name", TaskError)
    elif config.name in TASKS:
        cls = TASKS[config.name]
    else:
        raise TaskError(
            f"task.name: unknown task {config.name!r}{nearest(config.name, TASKS)} (a task of your own is "
            "named package.module:Class or path/to/file.py:Class)"
        )
    if dataclasses.is_dataclass(cls):
        try:
            hints = typing.get_type_hints(cls)
        except NameError:  # a type that only a type checker imports
            hints = {}
        _check_options(config, {f.name: hints.get(f.name) for f in dataclasses.fields(cls) if f.init})
    try:
        task = cls(**config.options)
    except TaskError:
        raise
    except (TypeError, ValueError) as error:
        raise TaskError(f"task.options: cannot build {config.name} with {config.options}: {error}") from error
    # A property is looked up on the class and not evaluated, because it may read a file.
    missing = [part for part in REQUIRED if not (hasattr(cls, part) or hasattr(task, part))]
    if missing:
        raise TaskError(f"task.name: {config.name} lacks {', '.join(missing)}; see moe_rl.rollout.Task")
    alphabet, tokens = (inspect.getattr_static(task, part, property()) for part in ("alphabet", "max_new_tokens"))
    if not isinstance(alphabet, str) and not hasattr(alphabet, "__get__"):
        raise TaskError(f"task.name: {config.name}.alphabet: expected a text of all its characters, got {alphabet!r}")
    whole = isinstance(tokens, numbers.Integral) and not isinstance(tokens, bool) and int(tokens) > 0
    if not whole and not hasattr(tokens, "__get__"):
        raise TaskError(f"task.name: {config.name}.max_new_tokens: expected a whole number above 0, got {tokens!r}")
    return task


def _check_options(config: TaskConfig, known: Mapping[str, Any]) -> None:
    """Raise TaskError if an option is not among the `known` fields (name -> type) or has a wrong simple type."""
    for key, value in config.options.items():
        if key not in known:
            raise TaskError(f"task.options.{key}: {config.name} has no such option{nearest(str(key), known)}")
        kind = known[key]
        if kind not in (int, float, str, bool):
            continue  # other types are left to the class itself to check
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise TaskError(f"task.options.{key}: expected {kind.__name__}, got {value!r}")
