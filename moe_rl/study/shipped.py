"""Study files: how they are found by path or name, and an outline of their content, read without torch.

The studies of `experiments/` travel inside the wheel, so that `moe-rl study replay_vs_gspo` works anywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.names import nearest
from moe_rl.settings import at
from moe_rl.yaml_files import YamlError, parse_yaml


class ConfigError(ValueError):
    """Error about a study file that cannot be used; the message names the file, the field and the remedy."""


class StudyFileError(ConfigError):
    """Error about a study file that is missing or cannot be read, or that names code or machines which are not trusted.

    Also about a list of studies where one study is wanted.
    """


@dataclass(frozen=True)
class Outline:
    """The outline of a study file, before the file is checked.

    name, question: as written; empty where they are missing.
    studies: the studies that a file without arms lists, by name or by path beside the file; else empty.
    then: the commands in such a file that read what those studies wrote; the commands are shown, never run.
    arms: label by name, with the dose of selection noise.
    seeds: as written.
    foreign: each part of the file that makes other people's code run, or sends data to another machine, in words.
    """

    name: str
    question: str
    arms: dict[str, str]
    seeds: list[Any]
    foreign: tuple[str, ...]
    studies: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


def shipped_studies() -> dict[str, Path]:
    """Return, by name, the files of the studies in the package, and of the lists of studies that answer a question."""
    package = Path(__file__).parents[1]
    places = (package / "experiments", package.parent / "experiments")  # of an installed wheel, of a checkout
    folder = next((place for place in places if place.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("**/*.yaml"))}


def find_study(word: str) -> Path:
    """Return the study file that `word` means: a path if there is such a file, else the name of a shipped study.

    Raises:
        StudyFileError: `word` is neither; the message names the nearest match.
    """
    path, known = Path(word), shipped_studies()
    if word in known and not path.is_file():
        return known[word]
    if path.exists():
        return path
    if len(path.parts) > 1:
        read_study_file(path)  # raises StudyFileError
    near = nearest(word.lower(), [*known, *(p.name for p in Path().glob("*.y*ml"))], listed=False)
    near = near or "; `moe-rl study` lists those that do"
    raise StudyFileError(f"{word}: no such study file, and no study of that name comes with moe_rl{near}")


def read_study_file(path: Path) -> Any:
    """Return the content of a study file as plain data. Raises StudyFileError: no file, not readable, or not YAML."""
    if path.is_dir():
        raise StudyFileError(f"{path} is a folder; a study file is YAML")
    if not path.exists():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise StudyFileError(f"{path}: no such study file{near}")
    try:
        return parse_yaml(path.read_bytes())
    except (OSError, YamlError) as error:
        raise StudyFileError(f"{path}: {error}") from error


def outline(path: Path) -> Outline:
    """Return the outline of a study file. Other errors inside the file are left to `moe_rl.study.config.load_study`.

    Raises:
        StudyFileError: no file, or not YAML, or `studies` or `then` is not a list of text.
    """
    data = read_study_file(path)
    data = data if isinstance(data, dict) else {}
    arms = data.get("arms")
    arms = arms if isinstance(arms, dict) else {}
    seeds = data.get("seeds", [0, 1, 2])
    return Outline(
        str(data.get("name", "")),
        " ".join(str(data.get("question", "")).split()),
        {str(name): _label(arm) for name, arm in arms.items()},
        seeds if isinstance(seeds, list) else [],
        tuple(dict.fromkeys(line for part in (data.get("base"), *arms.values()) for line in _foreign(part))),
        _words(data, "studies", path),
        _words(data, "then", path),
    )


def one_study(path: Path) -> Outline:
    """Return the `outline` of a file with one study. Raises StudyFileError also for a file that lists studies."""
    found = outline(path)
    if found.studies:
        raise StudyFileError(
            f"{path} lists several studies, for `moe-rl study` to run; here one of them is wanted: "
            f"{', '.join(found.studies)}"
        )
    return found


def listed_studies(path: Path, found: Outline) -> list[Path]:
    """Return the study files that the list of studies in `path` names: files beside the list, else by `find_study`.

    Raises:
        StudyFileError: a study is neither, is a list itself, or is listed twice; or the file has arms of its own.
    """
    if found.arms:
        raise StudyFileError(f"{path} has arms of its own and lists other studies: only one of the two is possible")
    files = []
    for word in found.studies:
        beside = path.parent / word
        try:
            file = beside if beside.is_file() else find_study(word)
            one_study(file)
        except StudyFileError as error:
            raise StudyFileError(f"{path}: studies: {error}") from error
        if file in files:
            raise StudyFileError(f"{path}: studies: {word} is listed twice")
        files.append(file)
    return files


def short_question(question: str) -> str:
    """Return the text up to its first question mark.

    >>> short_question("Routes change. Does GRPO need replay? And then?")
    'Routes change. Does GRPO need replay?'
    """
    asked, mark, _ = question.partition("?")
    return asked + mark


def refuse_foreign_code(path: Path, found: Outline, trust: bool) -> None:
    """Raise StudyFileError if a study file names foreign code, or a machine to which data are sent, without `trust`.

    To be called before code that is not this package's is imported, and before anything is sent.

    Raises:
        StudyFileError: the file names such code, or such a machine, and `trust` is not given.
    """
    if found.foreign and not trust:
        listed = "".join(f"\n  {line}" for line in found.foreign)
        raise StudyFileError(
            f"{path} runs code that is no part of moe_rl, with all your rights, or sends your data away:{listed}\n"
            "Nothing has been run or sent. Read it; if you trust it, repeat the command with --trust."
        )


def _words(data: Mapping[str, Any], name: str, path: Path) -> tuple[str, ...]:
    words = data.get(name) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise StudyFileError(f"{path}: {name}: expected a list of text, got {words!r}")
    return tuple(words)


def _label(arm: Any) -> str:
    """Return the label of an arm, with the dose of selection noise unless the label names noise."""
    label, noise = str(at(arm, "label") or ""), at(arm, "method", "noise")
    dose = f"selection noise {noise}" if noise and "noise" not in label else ""
    return ", ".join(filter(None, (label, dose)))


def _foreign(part: Any) -> list[str]:
    """Return in words what in `base`, or in one arm, runs foreign code or sends data to another machine."""
    found = []
    for where in (("task", "name"), ("rollout", "engine", "kind"), ("method", "gate")):
        value = at(part, *where)
        if ":" in str(value):
            place = str(value).rpartition(":")[0]
            file = f" ({Path(place).absolute()})" if place.endswith(".py") else ""
            found.append(f"{'.'.join(where)}: {value}{file}")
    if python := at(part, "rollout", "engine", "python"):
        found.append(f"rollout.engine.python: {python}")
    if url := at(part, "rollout", "engine", "url"):
        found.append(f"rollout.engine.url: {url} (gets weights, prompts and MOE_RL_VLLM_TOKEN)")
    if at(part, "model", "trust_remote_code"):
        model = at(part, "model", "path") or "the model"
        found.append(f"model.trust_remote_code: the Python files that come with {model}")
    return found
