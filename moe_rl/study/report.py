"""One self-contained HTML page of a study: question, reading, table, figures, arms, commands, versions, limits."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from moe_rl.files import still_written, write_atomic
from moe_rl.pages import render_page
from moe_rl.settings import flatten
from moe_rl.starts import environments
from moe_rl.study.alarm_table import alarm_rows, collapses
from moe_rl.study.answer import answer
from moe_rl.study.arms import arm_settings, full_label
from moe_rl.study.comparing import interest
from moe_rl.study.data import Run, StudyData, declared_arms, load
from moe_rl.study.figures import StudyFigure, drawn_figures, save_figure
from moe_rl.study.figures.screen import inline_svg
from moe_rl.study.outcomes import counts_shown, final_rewards, reward_names
from moe_rl.study.reading import read, rules
from moe_rl.study.roundings import component_table, conclusion_table
from moe_rl.study.statistics import interval_note, seed_interval
from moe_rl.study.summary import POSITIONS
from moe_rl.study.token_view import token_view_html
from moe_rl.study.words import by_topic, count, listed, probability

FIRST = "final_reward"
"""Name of the figure that stands beside the verdict."""
MAIN_FIGURES = 6

LIMITS = (
    "Nothing here is a statement about models, tasks and hyper-parameters that no run has, and a tiny model "
    "is an instrument for the mechanism, not a stand-in for a large one.",
    "“Not resolved” means that these runs do not tell the arms apart, not that the arms are equal.",
    "Hyper-parameters were not tuned separately for each arm; a learning rate or a clip range that suits one method "
    "may not suit another.",
    "The probe replays routes on the training engine's own old policy (R2). Differences between a separate rollout "
    "engine and the training engine are not in it.",
)


def draw_study(path: str | Path) -> Path:
    """Draw all figures of a study into `path`/figures and write `report.html`; return the path of the page.

    `path` is a study (or run) folder; `report.html` is written into it. Each figure is drawn once. The page needs no
    network; only its token view needs its (inline) script. Raises StudyDataError as `load`, and NothingToDraw if the
    runs hold nothing that can be drawn yet.
    """
    data = load(path)
    figures, skipped = drawn_figures(path, data)
    for figure in figures:
        save_figure(figure, data.folder / "figures")
    return write_atomic(data.folder / "report.html", render_report(data, figures, skipped))


def render_report(data: StudyData, figures: Sequence[StudyFigure], skipped: Sequence[str] = ()) -> str:
    """Return the HTML page of a study as text; the same runs give the same page. `skipped`: why figures are missing."""
    filters = {
        "minus": lambda text: text.replace("-", "−"),
        "probability": lambda p: probability(p) if np.isfinite(p) else "–",
        "number": lambda value: f"{value:.3f}".replace("-", "−") if np.isfinite(value) else "–",
    }
    differ, shared = arm_settings(data)
    finals = final_rewards(data)
    final, beside = reward_names(finals)
    return render_page(
        "study/report.html.j2",
        filters,
        data=data,
        question=str(data.config.get("question") or ""),
        notes=str(data.config.get("notes") or ""),
        statements=by_topic(read(data)),
        answer=answer(data),
        rules=rules(interest(data)),
        intervals=interval_note(int(finals["n"].mode().iloc[0]), finals["n"]),
        positions=POSITIONS,
        conclusions=conclusion_table(data).to_dict("records"),
        components=component_table(data).to_dict("records"),
        finals=_finals(data),
        final=final,
        beside=beside,
        alarms=alarm_rows(data),
        collapsed=collapses(data),
        **_arranged(figures),
        missing=list(skipped),
        token_view=token_view_html(data),
        arms=_arms(data),
        differ=[
            (name, [_plain(value) for value in row]) for name, row in zip(differ.index, differ.to_numpy(), strict=True)
        ],
        shared=[(name, _plain(value)) for name, value in shared.items()],
        commands=_commands(data),
        environment=_environment(data),
        limits=[*_own_limits(data), *LIMITS],
    )


def _arranged(drawn: Sequence[StudyFigure]) -> dict[str, Any]:
    """Return the figures of the page: one beside the verdict, five more, and the rest for the appendix.

    `shared_notes` are the sentences that several captions share, each once.
    """
    shown = [{"figure": figure, "svg": Markup(inline_svg(figure))} for figure in drawn]
    first = shown[0] if drawn and drawn[0].name == FIRST else None
    rest = shown[1:] if first else shown
    most = MAIN_FIGURES - (1 if first else 0)
    notes = dict.fromkeys(note for figure in drawn for note in figure.notes)
    return {"first": first, "main_figures": rest[:most], "appendix": rest[most:], "shared_notes": list(notes)}


def _finals(data: StudyData) -> list[dict[str, Any]]:
    """Return the rows of `final_rewards` with the texts of the page's table."""
    rows = final_rewards(data).to_dict("records")
    for row in rows:
        beside = "sampled" if "sampled" in row else "evaluation"
        row["label"] = full_label(data, row["arm"])
        row["seeds"] = ", ".join(f"{value:.3f}" if np.isfinite(value) else "–" for value in row["by_seed"].values())
        row["bounds"] = seed_interval([*row["by_seed"].values()]).bounds
        row["beside"] = row[beside]
        row["beside_bounds"] = seed_interval([*row[f"{beside}_by_seed"].values()]).bounds
        row["note"] = ", held out" if row["measured"] == "held out" and beside == "evaluation" else ""
        left = len(data.arms["seeds"][row["arm"]]) - row["finished"]
        row["note"] += f" ({left} of {count(left + row['finished'], 'run')} unfinished)" if left else ""
        row["wrong"] = counts_shown(row)
    return [{str(key): value for key, value in row.items()} for row in rows]


def _arms(data: StudyData) -> list[dict[str, Any]]:
    declared = declared_arms(data.config)
    return [
        {
            "arm": arm,
            "label": full_label(data, str(arm)),
            "seeds": ", ".join(map(str, row["seeds"])),
            "finished": f"{row['finished']} of {len(row['seeds'])}",
            "note": declared.get(str(arm), {}).get("note") or "",
        }
        for arm, row in data.arms.iterrows()
    ]


def _commands(data: StudyData) -> list[tuple[str, str]]:
    """Return (purpose, command) of the commands that made the runs, and that make the page and its tables again."""
    places = [data.environment] if data.environment.get("command") else [run.environment for run in data.runs]
    recorded = dict.fromkeys(str(place["command"]) for place in places if place.get("command"))
    folder = str(data.folder if data.folder.parts else Path("runs") / data.name)
    return [
        *(("as recorded", command) for command in recorded),
        ("figures and this page again", shlex.join(["moe-rl", "figures", folder])),
        ("the same tables in Python", f"moe_rl.study.load({json.dumps(folder, ensure_ascii=False)})"),
    ]


def _environment(data: StudyData) -> list[tuple[str, str]]:
    """Return every recorded fact of the environments, with all its values where runs differ; start times as a range."""
    values: dict[str, dict[str, None]] = {}
    for start in (start for run in data.runs for start in environments(run.environment)):
        for name, value in flatten(start).items():
            if name != "command" and value is not None:
                values.setdefault(name, {})[_plain(value)] = None
    rows = []
    for name, seen in values.items():
        found = sorted(seen)
        if name == "started" and len(found) > 1:
            found = [f"{found[0]} to {found[-1]}"]
        rows.append((name.removeprefix("versions."), ", ".join(found)))
    return rows


def _own_limits(data: StudyData) -> list[str]:
    """Return sentences on the limits of this study, such as unfinished runs or different starts."""
    found = []
    if (data.arms["noise"] > 0).any():
        found.append(
            "Selection noise is a stress test: it injects routing volatility and does not reproduce the volatility "
            "that weight updates cause. Rows that are replayed do not see it: replay of all rows under noise is the "
            "natural replay run by construction."
        )
    if data.unfinished:
        runs = ", ".join(f"{run.name}{_silence(run)}" for run in data.unfinished)
        found.append(f"Unfinished runs are included as far as they got: {runs}.")
    if data.not_started:
        found.append(f"Runs that have not started yet: {', '.join(data.not_started)}.")
    if _differing(data, "task_sha256", lambda run: _plain(run.config.get("task"))):
        found.append(
            "The task's problems are not the same in all runs (task_sha256 of the environment): its data or code "
            "changed between them."
        )
    like = "task", "model"
    apart = _differing(data, "weights_sha256", lambda run: (run.seed, *(_plain(run.config.get(name)) for name in like)))
    if seeds := sorted({seed for seed, *_ in apart}):
        found.append(
            "Runs of one seed, task and model did not all begin from the same weights (weights_sha256 of the "
            "environment), as happens where cold starts were made on several machines: seed "
            f"{listed(map(str, seeds))}. They are paired by seed all the same, and their differences hold that of the "
            "starts."
        )
    elsewhere = [run.name for run in data.runs if len(environments(run.environment)) > 1]
    if elsewhere:
        found.append(
            f"Interrupted runs went on under other versions, or on another machine, than they began: "
            f"{', '.join(elsewhere)}. The environment lists both."
        )
    dirty = {start.get("git_dirty") for run in data.runs for start in environments(run.environment)}
    if True in dirty:
        found.append(
            "The source tree had uncommitted changes when runs were made, so the commit alone does not give it."
        )
    return found + [f"Note from reading the runs: {note}." for note in data.notes]


def _differing(data: StudyData, digest: str, alike: Callable[[Run], Any]) -> list[Any]:
    """Return the keys (`alike` of a run) of all groups of runs that differ in the `digest` of their environment."""
    found: dict[Any, set[str]] = {}
    for run in data.runs:
        found.setdefault(alike(run), set()).add(str(run.environment.get(digest, "")))
    return [key for key, digests in found.items() if len(digests - {""}) > 1]


def _silence(run: Run) -> str:
    """Return in words since when an unfinished run has written nothing, by the time of its metrics.jsonl."""
    metrics = run.folder / "metrics.jsonl"
    if not metrics.exists():
        return " (no row)"
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(metrics.stat().st_mtime))
    return f" (last row {since}{'; nothing writes to it any more' if still_written(run.folder) is False else ''})"


def _plain(value: Any) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
