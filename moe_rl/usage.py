"""Help pages of the command line, which are printed at once, without torch and without a configuration.

`first_page` is the help of the two commands that take a whole configuration; the complete list (`--help-all`) is made
from the configuration's own fields."""

import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path

from moe_rl.study.shipped import Outline, outline, shipped_studies, short_question

SUMMARY = {
    "study": "run all arms and seeds of a study; then draw its figures and report",
    "run": "run one arm with one seed",
    "figures": "draw figures and report of a study again, from its run folders",
    "watch": "follow a study in the browser",
    "drift": "how the routing of two or more checkpoints differs, whatever trained them",
    "floor": "what arithmetic alone does to a model's routes and log-probabilities, and how much is routing",
    "check-routes": "whether captured routes are those that a model chooses, and what is wrong with them",
    "compare-routes": "how two files of routes of the same tokens differ, e.g. of the rollout and the training engine",
    "doctor": "what this machine can run, and what a study would need",
}
"""The commands with what they do, in the order of the help."""

CONFIGURATION = {
    "--optim.steps N": "RL steps; each samples one batch of responses",
    "--optim.num-minibatches N": "updates made on each batch",
    "--optim.learning-rate X": "learning rate",
    "--rollout.prompts N": "prompts per step",
    "--rollout.group-size N": "responses per prompt",
    "--model.path MODEL": "a Mixture-of-Experts model, hub id or folder (default: a tiny one, made here)",
    "--task.name TASK": "what is to be solved: mod_chain, jsonl, reasoning_gym, ... or FILE.py:CLASS",
}
"""The fields of the configuration that most people set."""

STUDY_OPTIONS = {
    "--arms A B ...": "only these arms",
    "--seeds 0 1 ...": "these seeds, for every arm that names none of its own",
    "--workers N": "runs at a time (default: one per core, or one on a GPU)",
    "--output DIR": "where to write (default: runs/NAME)",
    "--cold-starts DIR": "where cold-started models are kept, for all studies (default: runs/cold_starts)",
    "--launcher slurm": "runs are jobs of a Slurm cluster, submitted and watched from here; submitit-local: here",
    "--launcher-options K=V ...": "of each job: partition=gpu timeout_min=600 gpus_per_node=8",
    "--rounding native avx2 ...": "repeat all of it with other CPU kernels, whose sums round differently",
    "--no-figures": "run only, draw nothing",
    "--trust": "let the study file run code that is no part of moe_rl, and send data to machines it names",
}
RUN_OPTIONS = {
    "--arm ARM": "which arm of the study",
    "--seed N": "seed (default: the study's first)",
    "--output DIR": "where to write (default: runs/NAME/ARM/seedN)",
    "--trust": "let the study file run code that is no part of moe_rl, and send data to machines it names",
    "--method.objective NAME": "grpo, gspo, dapo, ...: docs/methods.md lists them",
    "--method.replay KIND": "none, R2 (the old policy's routes), R3 (the rollout engine's) or PR2 (predicted ones)",
    "--method.noise X": "selection noise on the router logits in the update forward, a stress test",
}


def root_page() -> str:
    """Return the page of `moe-rl --help`."""
    return "\n\n".join(
        (
            "usage: moe-rl COMMAND ...",
            "Why is reinforcement learning of Mixture-of-Experts language models unstable? Record which experts are\n"
            "chosen, replay them, train GRPO, GRPO + Routing Replay and GSPO under one loop, and measure what differs.",
            _rows("commands:", SUMMARY),
            _rows("options:", {"--version": "print the version"}),
            "To begin: `moe-rl study` lists the studies that come with it, `moe-rl study quick` runs the smallest.\n"
            "`moe-rl COMMAND --help` explains a command.",
        )
    )


def studies_page() -> str:
    """Return the page of `moe-rl study` without arguments: the shipped studies, each under the first question of
    docs/findings.md that it answers."""
    places = shipped_studies()
    found = {name: outline(path) for name, path in places.items()}
    lists = {name: study for name, study in found.items() if study.studies}
    begin = ("quick", "replay_vs_gspo")
    asked = {name: short_question(study.question) for name, study in found.items()}
    left = {name: question for name, question in asked.items() if name not in lists}
    groups = {
        "to begin, the smallest (some three minutes) and the main study:": {
            name: left.pop(name) for name in begin if name in left
        }
    }
    for name, answers in lists.items():
        groups[f"{name}  {asked[name]}"] = {study: left.pop(study) for study in answers.studies if study in left} or {
            "": "(studies of other headings)"
        }
    groups["others, among them tuning and large models:"] = left
    head = (
        "Studies that come with moe_rl, each under the first question of docs/findings.md that it answers. "
        "`moe-rl study q1` runs all studies of question 1, those under other headings too."
    )
    return "\n\n".join(
        (
            "usage: moe-rl study NAME|FILE [options]",
            textwrap.fill(head, _width()),
            *(_rows(textwrap.fill(title, _width()), rows) for title, rows in groups.items()),
            "`moe-rl study NAME --help` shows a study's arms and the options.",
        )
    )


def first_page(command: str, word: str, file: Path | None) -> str:
    """Return the help of `study` or `run`: the options that people use and, given a study file, its arms and seeds.

    Args:
        word: what was written for the file; empty if nothing was.

    Raises:
        StudyFileError: the file is not there or not YAML.
    """
    word = word or "NAME|FILE"
    needed = " --arm ARM" if command == "run" else ""
    arms = "the arms' own values win over it" if command == "study" else "for this arm, whatever the file says"
    parts = [
        f"usage: moe-rl {command} {word}{needed} [options]",
        f"{SUMMARY[command].capitalize()}. Resumes what is unfinished.",
    ]
    if file is None:
        parts.append("NAME is a study that comes with moe_rl (`moe-rl study` lists them), FILE one of your own.")
    else:
        parts.append(study_summary(outline(file)))
    parts += [
        _rows("options:", STUDY_OPTIONS if command == "study" else RUN_OPTIONS),
        _rows(f"configuration ({arms}):", CONFIGURATION),
        f"`moe-rl {command} {word} --help-all` lists all options: every field of the configuration is one, but for\n"
        "task.options, rollout.engine.options and model.lora where the study file leaves them out.",
    ]
    return "\n\n".join(parts)


def study_summary(found: Outline) -> str:
    """Return a study's question, arms and seeds; for a list of studies, the question and the studies' names."""
    question = textwrap.fill(found.question, _width())
    if found.studies:
        return f"{question}\n\nstudies, one after the other: {' '.join(found.studies)}"
    seeds = f"seeds: {' '.join(map(str, found.seeds))}"
    return f"{question}\n\n{_rows('arms:', found.arms)}\n\n{seeds}"


def _rows(title: str, rows: Mapping[str, str]) -> str:
    """Return a list of two columns under its title."""
    column = min(28, max((len(name) for name in rows), default=0) + 2)
    lines = [title]
    for name, words in rows.items():
        wrapped = textwrap.wrap(words, _width() - column - 2) or [""]
        if len(name) + 2 > column:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:{column}}{wrapped.pop(0)}".rstrip())
        lines += [f"  {'':{column}}{line}" for line in wrapped]
    return "\n".join(lines)


def _width() -> int:
    """Return the width of the pages in letters."""
    return max(40, min(110, shutil.get_terminal_size((100, 24)).columns))  # a narrower terminal wraps the lines itself
