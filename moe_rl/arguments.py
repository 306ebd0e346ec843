"""Arguments of the command line: the study file, its arm and seed, the options that exist, help and error messages."""

import contextlib
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from moe_rl.names import closest, nearest

WHOLE = ("base", "config")
"""Fields of an options dataclass that hold a whole configuration, whose own fields become options without a prefix."""


def fail(message: str, status: int = 1) -> NoReturn:
    """Print `message` as an error on stderr and exit with `status`."""
    print(f"moe-rl: error: {message}", file=sys.stderr)
    sys.exit(status)


@dataclass(frozen=True)
class Given:
    """The arguments after `moe-rl study` or `moe-rl run`, split into the study file and the options.

    word, path: the first argument and the study file that it names; empty and None for `--help-all` without a study.
    options: the other arguments.
    studies: the study files that the file lists, if it lists any.
    then: commands that read what those studies wrote; they are shown, never run."""

    word: str
    path: Path | None
    options: list[str]
    studies: tuple[Path, ...] = ()
    then: tuple[str, ...] = ()


def study_file(command: str, arguments: list[str]) -> Given:
    """Return the study file and the options that the arguments of `study` or `run` name. Prints the first page of the
    help and exits if that is asked for; raises StudyFileError before code runs that is not trusted."""
    from moe_rl.study.shipped import find_study, listed_studies, one_study, outline, refuse_foreign_code
    from moe_rl.usage import first_page

    given = Given("", None, arguments)
    if arguments and not arguments[0].startswith("-"):
        given = Given(arguments[0], find_study(arguments[0]), arguments[1:])
    if {"-h", "--help"} & set(given.options):
        print(first_page(command, given.word, given.path))
        sys.exit(0)
    if given.path is not None:
        found = (outline if command == "study" else one_study)(given.path)
        if found.studies:
            return replace(given, studies=tuple(listed_studies(given.path, found)), then=found.then)
        refuse_foreign_code(given.path, found, "--trust" in given.options)
    elif "--help-all" not in given.options:
        fail(f"{command} needs a study as its first argument, NAME or FILE; `moe-rl study` lists the names", 2)
    return given


def load(path: Path | None, merged: bool = False) -> Any:
    """Return the study of a file; without a file, a study of one arm with the default configuration, so that its
    options can be listed. merged: as in `moe_rl.study.config.parse_study`."""
    from moe_rl.study.config import Arm, StudyConfig, load_study

    return StudyConfig("NAME", "", {"ARM": Arm("")}, (0,)) if path is None else load_study(path, merged)


def arm_and_seed(given: Given) -> tuple[str | None, int | None]:
    """Return the values of --arm and --seed, None for a missing one. Exits with a list of the arms if the study has
    several and --arm and --help-all are missing."""
    import tyro

    from moe_rl.study.shipped import outline
    from moe_rl.usage import study_summary

    @dataclass(frozen=True)
    class Chosen:
        arm: str = ""  # no None: it is how an arm may be called
        """Which arm of the study."""
        seed: int | None = None
        """A whole number from 0 on; by default the study's first."""

    options = [option for option in given.options if option != "--help-all"]
    chosen, _ = tyro.cli(Chosen, args=options, prog=f"moe-rl run {given.word}", return_unknown_args=True)
    if given.path is not None and not chosen.arm and "--help-all" not in given.options:
        found = outline(given.path)
        if len(found.arms) > 1:
            taken = any(option.partition("=")[0] == "--arms" for option in options)
            instead = ", not --arms" if taken else ""
            fail(f"run needs --arm{instead}: which arm of {given.word}?\n\n{study_summary(found)}", 2)
    return chosen.arm or None, chosen.seed


def parse(options: Any, arguments: list[str], program: str, default: Any = None) -> Any:
    """Return an instance of the dataclass `options`, parsed from arguments. Exits at a mistake, naming the nearest
    known option for an unknown one, and after --help-all, which prints every option."""
    import tyro

    meant = options if default is None else default
    known, of_files = option_names(meant), option_names(meant, listed=False)
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if file_only := next((option for option in of_files if f"{name}.".startswith(f"{option}.")), None):
            field = file_only.removeprefix("--").replace("-", "_")
            fail(f"{program}: {argument.partition('=')[0]}: {field} is set in a study file; then it has options", 2)
        if name.startswith("--") and name not in (*known, "--help", "--help-all", "--"):
            fail(f"{program}: unknown option {argument.partition('=')[0]}{_option_hint(name, known)}", 2)
    words = [word for argument in arguments for word in argument.split("=", 1)]
    listed = next((b for a, b in itertools.pairwise(words) if a == "--seeds" and "," in b), None)
    if listed is not None:
        fail(f"{program}: --seeds {listed}: seeds are separated by spaces, e.g. --seeds {listed.replace(',', ' ')}", 2)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    values = {} if default is None else {"default": default}
    with _custom_types(), _lines_joined():
        return tyro.cli(options, args=arguments, prog=program, config=(tyro.conf.AvoidSubcommands,), **values)


def _option_hint(name: str, known: list[str]) -> str:
    """Return a hint at what an unknown option may stand for: the options of the section of that name, the fields of
    that name (only those that most people set, if there are any), the nearest option of its section, or all of its
    section."""
    from moe_rl.usage import CONFIGURATION

    fields = [option for option in known if option.startswith(f"{name}.")]
    if fields:
        more = ", ..." if len(fields) > 4 else ""
        return (
            f": it is a section, with the options {', '.join(fields[:4])}{more}; as a whole it is set in a study file"
        )
    named = [option for option in known if option.endswith(f".{name.removeprefix('--')}")]
    named = [option for option in named if option in {words.split()[0] for words in CONFIGURATION}] or named
    if named:
        return f"; did you mean {' or '.join(named)}?"
    section, _, last = name.rpartition(".")
    inside = {option.rpartition(".")[2]: option for option in known if section and option.rpartition(".")[0] == section}
    if not inside:
        return nearest(name, known, listed=False)
    close = closest(last, inside)  # of the last words: what stands before them is the same
    return f"; known: {', '.join(inside.values())}" if close is None else f"; did you mean {inside[close]!r}?"


def option_names(options: Any, prefix: str = "", listed: bool = True) -> list[str]:
    """Return the options of a dataclass, or of an instance with its values, nested dataclasses included. Without
    `listed`, return the options that exist only where a study file has set them: those of empty mappings and of
    sections that are None."""
    names = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name, field.default)
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            names += option_names(value, prefix if not prefix and field.name in WHOLE else f"{prefix}{name}.", listed)
            continue
        if (value == {} or (value is None and "Config" in str(field.type))) == listed:
            continue
        names.append(f"--{prefix}{name}")
        if isinstance(value, bool):
            names.append(f"--{prefix}no-{name}")
        elif isinstance(value, dict):
            names += [f"--{prefix}{name}.{key.replace('_', '-')}" for key in map(str, value)]
    return names


@contextlib.contextmanager
def _lines_joined() -> Iterator[None]:
    """Context manager: print help texts without the line breaks of the source. tyro 1.0.17 keeps the line breaks of a
    field's docstring, because the docstring is indented."""
    try:
        import docstring_parser
    except ImportError:  # a later tyro that reads docstrings by itself
        yield
        return
    reader: Any = docstring_parser
    read = reader.parse_from_object

    def joined(options: Any) -> Any:
        found = read(options)
        for field in found.params:
            field.description = field.description and re.sub(r"(?<=\S)\n +(?=\S)", " ", field.description)
        return found

    reader.parse_from_object = joined
    try:
        yield
    finally:
        reader.parse_from_object = read


def _path(word: str) -> Path:
    """Return the path that `word` names. Raises ValueError for an empty one, which Path takes for this folder."""
    if not word:
        raise ValueError("a path is needed, and '' is none (an unset variable of the shell?); say . for this folder")
    return Path(word).expanduser()


def _custom_types() -> Any:
    """Return a tyro registry with rules for two types: engine corrections, written as --method.corrections
    token_mask:0.5:5 token_truncate:2, and paths, in which `~` is expanded because the shell leaves it alone in
    --output=~/runs."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        kind = info.type
        if getattr(kind, "__name__", "") == "Correction":  # compared by name, so that no torch is imported here
            metavar, made = "KIND:[LOW:]HIGH", kind.parse
        elif kind is Path:
            metavar, made = "PATH", _path
        else:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: made(words[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

    return registry
