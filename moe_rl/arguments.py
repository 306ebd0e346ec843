"""Arguments of the command line: the study that is meant, its arm and seed, options that exist; help and mistakes."""

import contextlib
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from moe_rl.names import nearest

WHOLE = ("base", "config")
"""Fields of options that are a whole configuration, whose own fields are options without a prefix."""


def fail(message: str, status: int = 1) -> NoReturn:
    """Say what is wrong on stderr and leave."""
    print(f"moe-rl: error: {message}", file=sys.stderr)
    sys.exit(status)


@dataclass(frozen=True)
class Given:
    """What was written after `study` or `run`.

    word, path: the first argument and the study file that it means; empty and None where only options are listed.
    options: the other arguments.
    studies: the study files that the file lists, if it lists any.
    then: commands that read what those studies wrote.
    """

    word: str
    path: Path | None
    options: list[str]
    studies: tuple[Path, ...] = ()
    then: tuple[str, ...] = ()


def study_file(command: str, arguments: list[str]) -> Given:
    """Tell the study file from the options. Prints the first page of the help and leaves where that is asked for;
    leaves before code runs that is not trusted."""
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
    """The study; without a file one of a single arm with the default configuration, whose options can be listed.
    merged: as `moe_rl.study.config.parse_study`."""
    from moe_rl.study.config import Arm, StudyConfig, load_study

    return StudyConfig("NAME", "", {"ARM": Arm("")}, (0,)) if path is None else load_study(path, merged)


def arm_and_seed(given: Given) -> tuple[str | None, int | None]:
    """What --arm and --seed say. Leaves, and says which arms there are, where a study has several and none is named."""
    import tyro

    from moe_rl.study.shipped import outline
    from moe_rl.usage import study_summary

    @dataclass(frozen=True)
    class Chosen:
        arm: str | None = None
        """Which arm of the study."""
        seed: int | None = None
        """A whole number from 0 on; by default the study's first."""

    options = [option for option in given.options if option != "--help-all"]
    chosen, _ = tyro.cli(Chosen, args=options, prog=f"moe-rl run {given.word}", return_unknown_args=True)
    if given.path is not None and chosen.arm is None and "--help-all" not in given.options:
        found = outline(given.path)
        if len(found.arms) > 1:
            taken = any(option.partition("=")[0] == "--arms" for option in options)
            instead = ", not --arms" if taken else ""
            fail(f"run needs --arm{instead}: which arm of {given.word}?\n\n{study_summary(found)}", 2)
    return chosen.arm, chosen.seed


def parse(options: Any, arguments: list[str], program: str, default: Any = None) -> Any:
    """An instance of the dataclass `options` from arguments. Leaves at a mistake, with the nearest match of an unknown
    option, and after --help-all, which prints every option."""
    import tyro

    meant = options if default is None else default
    known, of_files = option_names(meant), option_names(meant, listed=False)
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if file_only := next((option for option in of_files if f"{name}.".startswith(f"{option}.")), None):
            field = file_only.removeprefix("--").replace("-", "_")
            fail(f"{program}: {argument.partition('=')[0]}: {field} is set in a study file; then it has options", 2)
        if name.startswith("--") and name not in (*known, "--help", "--help-all", "--"):
            fail(f"{program}: unknown option {argument.partition('=')[0]}{_meant(name, known)}", 2)
    listed = next((b for a, b in itertools.pairwise(arguments) if a == "--seeds" and "," in b), None)
    if listed is not None:
        fail(f"{program}: --seeds {listed}: seeds are separated by spaces, e.g. --seeds {listed.replace(',', ' ')}", 2)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    values = {} if default is None else {"default": default}
    with _our_words(), _lines_joined():
        return tyro.cli(options, args=arguments, prog=program, config=(tyro.conf.AvoidSubcommands,), **values)


def _meant(name: str, known: list[str]) -> str:
    """A hint at what an unknown option may stand for: a section's fields, fields of that name (those that most people
    set, if there are any), or the nearest option."""
    from moe_rl.usage import CONFIGURATION

    fields = [option for option in known if option.startswith(f"{name}.")]
    if fields:
        more = ", ..." if len(fields) > 4 else ""
        return (
            f": it is a section, with the options {', '.join(fields[:4])}{more}; as a whole it is set in a study file"
        )
    named = [option for option in known if option.endswith(f".{name.removeprefix('--')}")]
    named = [option for option in named if option in {words.split()[0] for words in CONFIGURATION}] or named
    return f"; did you mean {' or '.join(named)}?" if named else nearest(name, known, listed=False)


def option_names(options: Any, prefix: str = "", listed: bool = True) -> list[str]:
    """The options that a dataclass, or nested ones with their values, are given as; not `listed`: those that there are
    only where a study file has set them, of mappings that are empty and sections that are None."""
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
    """Help without the line breaks of the source. tyro 1.0.17 keeps those of a field's docstring, as it is indented."""
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


def _our_words() -> Any:
    """Engine corrections as words: --method.corrections token_mask:0.5:5 token_truncate:2; and ~ of a path, which the
    shell leaves as it is in --output=~/runs."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        kind = info.type
        if getattr(kind, "__name__", "") == "Correction":  # by name: help must not import torch
            metavar, made = "KIND:[LOW:]HIGH", kind.parse
        elif kind is Path:
            metavar, made = "PATH", lambda word: Path(word).expanduser()
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
