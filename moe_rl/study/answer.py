"""First answers of a report: whether arms differ, GRPO needed replay, GSPO did without replay, and what n can say.

The answers are written by rule from the verdicts of the comparisons. The line on whether arms differ is there if some
comparison is neither of replay with GRPO nor of GSPO with one of the two, or is of arms that differ in other settings,
too, or if there are no comparisons. If fewer than two of the first three questions apply, a line says how many runs
failed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moe_rl.study.arms import condition_label, dose_label, full_label, same_but_for_method
from moe_rl.study.comparing import Pair, comparisons, declared
from moe_rl.study.curves import FAILED, GAIN
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import final_rewards, reward_names, run_outcomes, start_name
from moe_rl.study.reading import by_arm, name_of, power_sentence, untold
from moe_rl.study.statistics import Verdict
from moe_rl.study.words import count, listed, minus

REPLAY, NO_REPLAY = "grpo_replay", "grpo"
MOST_NAMED = 4
"""Most comparisons that the line on whether arms differ names. Of more it gives counts; the table below names all."""


@dataclass(frozen=True)
class Line:
    """One line of the answer: a question, its answer in a word or two, and what must be known with the answer."""

    question: str
    answer: str
    text: str


@dataclass(frozen=True)
class Row:
    """One comparison as the page shows it: in short on the first screen, and in full among the tables."""

    pair: Pair
    condition: str
    comparison: str
    difference: str
    interval: str


@dataclass(frozen=True)
class Answer:
    """What a reader of the report sees first: three or four lines, one row per comparison, and a note."""

    lines: tuple[Line, ...]
    rows: tuple[Row, ...]
    note: str


def answer(data: StudyData) -> Answer:
    """Return the words and numbers of the first screen.

    Raises nothing: for a study without a finished run the lines say that none has finished.
    """
    pairs = comparisons(data)
    alike = [p for p in pairs if same_but_for_method(data, p.arm, p.other)]
    replay = [p for p in alike if _methods(data, p) == (REPLAY, NO_REPLAY)]
    gspo = [p for p in alike if _methods(data, p) in (("gspo", NO_REPLAY), ("gspo", REPLAY))]
    others = [p for p in pairs if p not in replay and p not in gspo]
    told = [_resolved(data, others, bool(replay or gspo))] if others or not pairs else []
    named: dict[str, None] = {}  # arms of which an earlier line says how many runs failed
    for question, asked in ((_need, replay), (_without_replay, gspo)):
        if asked:
            told.append(question(data, asked, _failures_of(data, asked, named)))
            named |= _arms(asked)
    told += [_failures(data, named)] if len(told) < 2 else []
    lines = (*told, Line("What can n say?", _seeds(data, pairs), minus(f"{power_sentence(data)}{_left(data)}")))
    undeclared = "" if declared(data) is not None else "These comparisons were not declared in the study file. "
    final, _ = reward_names(run_outcomes(data))
    note = f"{undeclared}Difference of {final}, paired by seed. p adjusted for the number of comparisons."
    return Answer(lines, tuple(_row(data, pair) for pair in pairs), note)


def _methods(data: StudyData, pair: Pair) -> tuple[str, str]:
    """Return the methods of a pair's `arm` and `other`."""
    return str(data.arms["method"][pair.arm]), str(data.arms["method"][pair.other])


def _arms(pairs: Sequence[Pair]) -> dict[str, None]:
    return dict.fromkeys(arm for pair in pairs for arm in (pair.other, pair.arm))


def _need(data: StudyData, pairs: Sequence[Pair], failures: str) -> Line:
    """Return the line on whether GRPO needed replay."""
    words = {
        Verdict.HIGHER: "yes",
        Verdict.LOWER: "no, replay ended lower",
        Verdict.EQUIVALENT: "no",
        Verdict.SMALL: "replay ended a little {}",
        Verdict.NOT_RESOLVED: "not resolved",
        Verdict.TOO_FEW: "too few seeds",
    }
    return Line("Did GRPO need replay?", _answers(data, pairs, words), failures)


def _without_replay(data: StudyData, pairs: Sequence[Pair], failures: str) -> Line:
    """Return the line on whether GSPO did without replay: against replay if that was compared, else against GRPO."""
    with_replay = {p.noise for p in pairs if _methods(data, p)[1] == REPLAY}
    told = [p for p in pairs if _methods(data, p)[1] == REPLAY or p.noise not in with_replay]
    words = {
        Verdict.HIGHER: "yes, ended higher",
        Verdict.LOWER: "no, ended lower",
        Verdict.EQUIVALENT: "yes, ended as high",
        Verdict.SMALL: "ended a little {}",
        Verdict.NOT_RESOLVED: "not resolved",
        Verdict.TOO_FEW: "too few seeds",
    }
    return Line("Did GSPO do without replay?", _answers(data, told, words, against=True), failures)


def _answers(data: StudyData, pairs: Sequence[Pair], words: dict[Verdict, str], against: bool = False) -> str:
    """Return the verdicts of the pairs in words; places with the same word are named together.

    There is one word for each condition, or for each control if a condition has several, or for each pair if a control
    has several.
    """
    grouped: dict[str, list[str]] = {}
    several = len({pair.noise for pair in pairs}) < len(pairs)
    by_name = len({pair.other for pair in pairs}) < len(pairs)
    for pair in pairs:
        word = words[pair.result.verdict].format("higher" if pair.result.difference.estimate > 0 else "lower")
        if against and not several and pair.result.verdict not in (Verdict.NOT_RESOLVED, Verdict.TOO_FEW):
            other = "GRPO + Routing Replay" if _methods(data, pair)[1] == REPLAY else "GRPO"
            word += f" {'as' if pair.result.verdict == Verdict.EQUIVALENT else 'than'} {other}"
        ends = final_rewards(data).set_index("arm").loc[[pair.arm, pair.other]]
        both = (ends["failed"] * 2 > ends["judged"]).all()
        if both and pair.result.tested:
            word = f"most runs of both failed ({pair.result.verdict})"
        place = f"against {full_label(data, pair.other)}" if several else _place(data, pair.noise)
        place = f"{full_label(data, pair.arm)} {place}" if several and by_name else place
        grouped.setdefault(word, []).append(place)
    noises = dict.fromkeys(pair.noise for pair in pairs)
    one = len(grouped) == 1
    unsaid = (one or several) and all(noises)  # all pairs have noise, and no place names it
    under = f", {listed(_place(data, noise) for noise in noises)}" if unsaid else ""
    said = next(iter(grouped)) if one else "; ".join(f"{listed(places)}: {word}" for word, places in grouped.items())
    return _capital(f"{said}{under}")


def _place(data: StudyData, noise: float) -> str:
    """Return a condition as part of a sentence: `naturally`, or `with` its measured dose or its noise."""
    return f"with {dose_label(data, noise) or condition_label(data, noise)}" if noise else "naturally"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _failures_of(data: StudyData, pairs: Sequence[Pair], named: Collection[str]) -> str:
    """Return a sentence on which compared arms had failed runs, without arms `named` before; empty if all were."""
    if not run_outcomes(data)["start"].notna().any():
        return "" if named else "No run recorded its reward at step 0, so it cannot be told which failed."
    arms = [arm for arm in _arms(pairs) if arm not in named]
    if not arms:
        return ""
    table = final_rewards(data).set_index("arm", drop=False).loc[arms]
    failed = by_arm(data, table)
    which = "other finished" if untold(table) else "finished"
    these, of = ("the other", " of the other arms") if named else ("these", "")
    text = f"None of {these} arms' {which} runs failed."
    text = f"Runs{of} that failed ({FAILED}): {listed(failed)}." if failed else text
    if not table["judged"].any():
        text = "" if table["finished"].any() else f"No run of {these} arms has finished."
    return f"{text}{untold(table)}"


def _resolved(data: StudyData, pairs: Sequence[Pair], more: bool) -> Line:
    """Return the line on whether the arms differ, from the comparisons that no other question is about (more: there are
    such questions, in the lines below).

    Up to `MOST_NAMED` comparisons are all named. Of more, those told apart or told equal are named if at most
    `MOST_NAMED` are, else the verdicts are counted.
    """
    if not pairs:
        none_declared = "The study file compares none: its question is not of rewards."
        given = declared(data)
        without = [
            arm for arm in dict.fromkeys(arm for pair in given or () for arm in pair) if arm not in data.arms.index
        ]
        none_finished = (
            f"The study file declares comparisons of {listed(without)}, of which there is no run."
            if without
            else "No two arms of one condition that differ in the method alone, or in something else alone, have "
            "finished runs; others are compared where the study file declares `comparisons`."
        )
        return Line("Do the arms differ?", "Not compared", none_declared if given == [] else none_finished)
    verdicts = [pair.result.verdict for pair in pairs]
    apart, equal = sum(pair.result.apart for pair in pairs), verdicts.count(Verdict.EQUIVALENT)
    words = f"{apart} of {count(len(pairs), 'comparison')} told apart" + (f", {equal} told equal" if equal else "")
    words += " besides those below" if more else ""
    few = len(pairs) <= MOST_NAMED
    named = [pair for pair in pairs if few or pair.result.claims]
    if named and len(named) <= MOST_NAMED:
        said = [f"{_named(data, pair)}: {_difference(pair)}, {pair.result.verdict}" for pair in named]
        rest = [pair.result.verdict for pair in pairs if not (few or pair.result.claims)]
        return Line("Do the arms differ?", words, "; ".join([*said, _counted(rest)] if rest else said) + ".")
    return Line("Do the arms differ?", words, f"{_capital(_counted(verdicts))}.")


def _counted(verdicts: Sequence[Verdict]) -> str:
    """Return how many comparisons have each verdict, in words."""
    words_of = {v: f"with {v}" if v == Verdict.TOO_FEW else str(v) for v in dict.fromkeys(verdicts)}
    return listed(f"{verdicts.count(v)} {word}" for v, word in words_of.items())


def _failures(data: StudyData, named: Collection[str]) -> Line:
    """Return the line on how many runs failed; it lists arms, but not those that an earlier line `named`."""
    table = final_rewards(data)
    failed = by_arm(data, table[~table["arm"].isin(list(named))])
    total, runs = int(table["failed"].sum()), int(table["judged"].sum())
    if not run_outcomes(data)["start"].notna().any():
        return Line("Did runs fail?", "Cannot be told", "No run recorded its reward at step 0.")
    every = "Every other finished run" if untold(table) else "Every finished run"
    text = "" if total else f"{every} gained more than {GAIN} over {start_name(data)}."
    who = "Runs of the other arms that failed" if named else "Failed"
    text = f"{who} ({FAILED}): {listed(failed)}." if failed else text
    if not runs:
        text = "" if table["finished"].any() else "No run has finished."
    return Line("Did runs fail?", f"{total} of {count(runs, 'finished run')}", f"{text}{untold(table)}")


def _seeds(data: StudyData, pairs: Sequence[Pair]) -> str:
    """Return `n = ...`: seeds of a comparison or, if no arms are compared, finished runs of an arm."""
    counts = sorted({pair.result.n for pair in pairs} or set(data.arms["finished"]))
    return f"n = {' or '.join(map(str, counts))}"


def _left(data: StudyData) -> str:
    """Return a sentence on how many runs are unfinished and so in no comparison; empty if all are finished."""
    left = len(data.unfinished) + len(data.not_started)
    total = count(len(data.runs) + len(data.not_started), "run")
    return f" {left} of {total} not finished, and in no comparison." if left else ""


def _difference(pair: Pair) -> str:
    return minus(f"{pair.result.difference.estimate:+.3f}") if pair.result.n else "–"


def _row(data: StudyData, pair: Pair) -> Row:
    bounds = minus(pair.result.difference.bounds)
    return Row(pair, condition_label(data, pair.noise), _named(data, pair), _difference(pair), bounds)


def _named(data: StudyData, pair: Pair) -> str:
    """Return a comparison's name, `label − label`."""
    return f"{name_of(data, pair.arm, pair.noise)} − {name_of(data, pair.other, pair.noise)}"
