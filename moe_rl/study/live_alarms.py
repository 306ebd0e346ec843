"""The alarms of runs that are being written: what each new row adds."""

from pathlib import Path
from typing import Any

from moe_rl.study.alarms import ALARMS, Alarm, AlarmError, RunAlarms, alarms_of
from moe_rl.study.live_rows import read_since


class LiveAlarms:
    """The alarms of one run up to its last row; a run that was rewritten is read again."""

    def __init__(self, path: Path, alarms: tuple[Alarm, ...]):
        self.path, self.alarms = path, alarms
        self.state, self.since = RunAlarms(alarms), ""

    def now(self) -> dict[str, Any]:
        """`RunAlarms.summary` of all rows that are there."""
        more = True
        while more:
            rows, answer = read_since(self.path, self.since)
            if answer["reset"]:
                self.state = RunAlarms(self.alarms)
            for row in rows:
                self.state.take(row)
            self.since, more = answer["since"], answer["more"]
        return self.state.summary()


def live_table(own: Any) -> tuple[tuple[Alarm, ...], str]:
    """A study's alarms, and what is wrong with thresholds that it sets itself (then those of the table hold)."""
    try:
        return alarms_of(own), ""
    except AlarmError as error:
        return ALARMS, str(error)
