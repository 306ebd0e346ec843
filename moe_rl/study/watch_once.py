"""`moe-rl watch DIR --once`: the alarms of runs as they are at this moment, as lines of text."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moe_rl.done import remedy, what_is_lost
from moe_rl.study.alarms import Alarm, RunAlarms, alarms_of
from moe_rl.study.data import Run, StudyDataError
from moe_rl.study.folders import read_lines, read_yaml, run_seed
from moe_rl.study.live import LiveStudies


def print_alarms(folder: str | Path) -> int:
    """Print the alarms of the runs under a folder (`LiveStudies`), by the study's thresholds; return the exit status.

    Runs under other roundings are included. There is a line for each alarm that crossed, for each collapse, for each
    metric of the study's own alarms that a run has not recorded or wrote as null, and for what cannot be read.

    Returns 3 if anything crossed, collapsed or is null; else 1 if something of a run, or of one of several studies,
    cannot be read or is lost; else 0. Raises StudyDataError where there is no study, or the only study cannot be read.
    """
    studies, crossed, damaged, silent, count = LiveStudies(folder), False, False, 0, 0
    for study in studies.names() or [""]:
        live = studies.study(study)
        try:
            places = {"": live} | {again.folder.name: again for again in live.roundings()}
            for place in places.values():
                place.check()
        except StudyDataError as error:
            if not study:
                raise
            print(error)
            damaged = True
            continue
        table = alarms_of(live.thresholds)
        for again, run in [(again, run) for again, place in places.items() for run in place.runs()]:
            alarms, rows, notes, wrong = _read(run, table)
            told = list(_messages(alarms)) if rows else []
            for words in (*(words for words, _ in told), *notes, *wrong):
                print(f"{'/'.join(filter(None, (study, again, run.name)))}: {words}")
            crossed |= any(on for _, on in told)
            damaged, silent, count = damaged or bool(wrong), silent + (not rows), count + 1
    said = [] if crossed or damaged else ["no alarm has crossed"]
    if silent or not count:
        said.append(f"without rows so far: {silent} of {count} runs" if count else "there is no run yet")
    if said:
        print("; ".join(said))
    return 3 if crossed else int(damaged)


def _read(run: Run, table: tuple[Alarm, ...]) -> tuple[RunAlarms, int, list[str], list[str]]:
    """Return a run's alarms, the number of rows read, notes on rows that were left out, and what is wrong."""
    alarms, rows, notes, wrong = RunAlarms(table), 0, list[str](), list[str]()
    path, config = run.folder / "metrics.jsonl", run.folder / "config.yaml"
    try:
        for row in read_lines(path, notes, wrong) if path.exists() else ():
            alarms.take(row)
            rows += 1
        settings = read_yaml(config) if config.exists() else {}
        alarms.own = replace(run, config=settings).responses == "policy"
        run_seed(run.folder, settings)
        if lost := what_is_lost(run.folder):
            raise StudyDataError(f"{lost}. {remedy(run.folder)}")
    except StudyDataError as error:
        return alarms, rows, notes, [str(error)]
    except OSError as error:
        return alarms, rows, notes, [f"{error.filename} cannot be read ({error.strerror})"]
    more = f" and {len(wrong) - 1} more like it were" if len(wrong) > 1 else " was"
    return alarms, rows, notes, [f"{line}; it{more} left out" for line in wrong[:1]]


def _messages(alarms: RunAlarms) -> Iterator[tuple[str, bool]]:
    """Yield the messages on a run's alarms, each with whether it counts as an alarm."""
    for alarm in alarms.alarms:
        if steps := [step for step, _ in alarms.crossed[alarm.name]]:
            yield f"{alarm.name} crossed {_when(steps)} ({alarm.rule})", True
        nulls = alarms.nulls.get(alarm.name)
        if alarm.declared and nulls:  # null stands for a value that is not finite, beyond every threshold
            yield f"{alarm.kind}.{alarm.metric} is null {_when(nulls)} ({alarm.name})", True
        elif alarm.declared and not alarms.seen[alarm.name]:
            yield f"{alarm.name} has no value so far ({alarm.rule})", False
    if alarms.collapse is not None:
        yield f"the reward collapsed at step {alarms.collapse}", True


def _when(steps: list[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"at {len(steps)} steps, first {steps[0]}, last {steps[-1]}"
