"""Names that users write: hints at the nearest known name, checks of folder names, and objects that are loaded by name.
Every subpackage may import this module; it imports none of them."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

RESERVED = ("logs", "figures", "report.html", "study.yaml", "env.json", "config.yaml", "metrics.jsonl")
"""Names of what a study's folder holds besides its arms, and of the files by which a run's folder is recognised."""
ROUNDING = "rounding_"
"""Prefix of a folder `rounding_<name>` in a study's folder, which holds arms and seeds run again under another
rounding."""
LONGEST = 200
"""Most bytes of an arm's folder name: file systems allow 255, of which the seed and the endings of logs need some."""


def arm_refusal(name: str) -> str | None:
    """Return why the folder of a study can hold no arm of this name; None if it can.

    >>> arm_refusal("logs")
    "in a study's folder that name is something else's; choose another"
    """
    if name.casefold() in RESERVED or name.casefold().startswith(ROUNDING):  # on a Mac, logs and LOGS are one folder
        return "in a study's folder that name is something else's; choose another"
    if len(name.encode()) > LONGEST:
        return f"a folder is named so: at most {LONGEST} bytes in UTF-8, this has {len(name.encode())}"
    return None


def seed_of(folder: Path) -> int | None:
    """Return the seed in the name of a run's folder, seedN; None if the folder has another name.

    >>> seed_of(Path("runs/study/grpo/seed3")), seed_of(Path("runs/study/logs"))
    (3, None)
    """
    named = re.fullmatch(r"seed(\d+)", folder.name)
    return int(named[1]) if named else None


def run_place(folder: Path) -> Path:
    """Return the absolute path of a run's folder under the name that its study has for it, .../ARM/seedN, even if that
    is a link to elsewhere. `.`, and a link of another name to a run, are resolved."""
    named = Path(os.path.abspath(folder))
    return folder.resolve() if seed_of(named) is None else named


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `word`, or that has these initials; None if there is none. Upper and
    lower case are alike.

    >>> closest("GRPO", ["grpo", "gspo"]), closest("lr", ["steps", "learning_rate"]), closest("x", ["steps"])
    ('grpo', 'learning_rate', None)
    """
    names, word = {name.casefold(): name for name in known}, word.casefold()
    found = difflib.get_close_matches(word, names, n=1)
    found += [name for name in names if len(word) > 1 and "".join(re.findall(r"\b[a-z]|(?<=_)[a-z]", name)) == word]
    return names[found[0]] if found else None


def nearest(word: str, known: Iterable[str], listed: bool = True) -> str:
    """Return a hint at the nearest known word or, if no word is near, at all known words if `listed`.

    >>> nearest("grop", ["grpo", "gspo"])
    "; did you mean 'grpo'?"
    """
    known = sorted(known)
    close = closest(word, known)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(known)}" if known and listed else ""


def load_object(path: str, field: str, error: type[Exception], kind: Any = type, word: str = "class") -> Any:
    """Return the object of type `kind` that `package.module:name` or `path/to/file.py:name` names. Imports the module,
    which runs its code once.

    Args:
        field: where the path was written, for messages.
        error: what to raise.
        word: what messages call such an object.

    Raises:
        error: there is no such file, module or object, or the import of the module raised an exception.
    """
    place, _, name = path.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise error(f"{field}: there is no file {Path(place).absolute()}")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as raised:  # whatever a user's module, or script, may raise while it is imported
        raise error(f"{field}: cannot import {place!r}: {type(raised).__name__}: {raised}") from raised
    found = getattr(module, name, None)
    if not isinstance(found, kind):
        known = [key for key, value in vars(module).items() if isinstance(value, kind)]
        raise error(f"{field}: {place} has no {word} {name!r}{nearest(name, known)}")
    return found


def _module_of_file(file: Path) -> ModuleType:
    """Return the module of a Python file, which is run once as long as its content is the same, so that two calls find
    one class. The module gets a name of its own, so that a file called random.py hides no other module."""
    content = str(file.resolve()).encode() + file.read_bytes()
    name = f"moe_rl_own_{hashlib.sha256(content).hexdigest()[:8]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
