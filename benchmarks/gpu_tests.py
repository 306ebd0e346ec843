"""Outcome of every test that is marked `gpu`, as rows for docs/gpu.md.

python benchmarks/gpu_tests.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rows import command_line, row, write

ROOT = Path(__file__).resolve().parents[1]


def outcomes(report: str) -> list[dict[str, Any]]:
    """Return a row for each test in pytest's JUnit report, whose note is `passed` or why it failed or was skipped."""
    rows = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        said = [f"{child.tag}: {child.get('message', '')}" for child in case if not child.tag.startswith("system")]
        note = " ".join(said[0].split())[:200] if said else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        rows.append(row("gpu_tests", name, [float(case.get("time", 0))], note=note))
    return rows


def main() -> None:
    options = command_line(__doc__).parse_args()
    marked = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *marked]
        status = subprocess.run(command, cwd=ROOT).returncode
        rows = outcomes(report.read_text()) if report.exists() else []
    write(options.json, rows)
    sys.exit(status)


if __name__ == "__main__":
    main()
