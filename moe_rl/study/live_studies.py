"""One study, or a folder that holds several: which ones the live page can show."""

from pathlib import Path

from moe_rl.study.data import StudyDataError
from moe_rl.study.live import LiveStudy
from moe_rl.study.live_rows import LiveError


class LiveStudies:
    """The studies under a folder: it may be a run, a study, or a folder with studies in it (`runs/`).

    Raises StudyDataError where there is none of them.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.alone: LiveStudy | None = None
        try:
            self.alone = LiveStudy(self.folder)
        except StudyDataError:
            if not self.names():
                raise

    def names(self) -> list[str]:
        """Folders with a study, those that were written to last first; empty where the folder itself is the study."""
        if self.alone is not None or not self.folder.is_dir():
            return []
        found = [path.parent for path in self.folder.glob("*/study.yaml")]
        return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))]

    def study(self, name: str = "") -> LiveStudy:
        """The study called `name`, without one the first. Raises LiveError for any other: no paths from requests."""
        if self.alone is not None:
            return self.alone
        names = self.names()
        if not names or (name and name not in names):
            raise LiveError(f"no study {name!r}; there are {', '.join(names) or 'none any more'}")
        return LiveStudy(self.folder / (name or names[0]))
