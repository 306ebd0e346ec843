"""The pages: links lead somewhere, tables keep their columns, the index has every page."""

import dataclasses
import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from moe_rl.study.config import build
from moe_rl.training import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*.md")])


def prose(page):
    """Yield the number and text of each line of a page outside code blocks."""
    inside = True
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif inside:
            yield number, line


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = (re.match(r"#+ (.*)", line) for _, line in prose(page))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]) for heading in headings if heading)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    broken = []
    for number, line in prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not target.startswith("http") and not (file.exists() and (not anchor or anchor in anchors(file))):
                broken.append(f"{page.name}:{number}: {target}")
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_row_of_a_table_has_the_cells_of_its_head(page):
    cells, wrong = None, []
    for number, line in prose(page):
        found = len(re.findall(r"(?<!\\)\|", line)) if line.lstrip().startswith("|") else None
        if found is not None and cells is not None and found != cells:
            wrong.append(f"{page.name}:{number}: {line[:80]}")
        cells = found if cells is None or found is None else cells
    assert not wrong


@pytest.mark.parametrize("index, pages", [("README.md", "*.md"), ("findings.md", "findings/*.md")])
def test_an_index_has_every_page(index, pages):
    docs = ROOT / "docs"
    linked = {docs / target for target in re.findall(r"\]\(([\w/]+\.md)\)", (docs / index).read_text())}
    assert not set(docs.glob(pages)) - linked - {docs / "README.md"}


def test_what_moved_is_where_the_changelog_says():
    table = (ROOT / "CHANGELOG.md").read_text().partition("| 0.1 | 0.2 |")[2].partition("###")[0]
    new = [row.split(" | ")[-1] for row in table.splitlines() if row.count(" | ") == 1]
    names = {name for cell in new for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", cell)}
    assert len(names) > 40
    wrong = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(f"moe_rl.{name}")
        except (ImportError, AttributeError):
            wrong.append(name)
    assert not wrong


def test_settings_that_a_page_shows_are_those_of_a_study_file():
    """`section: {field: value}` in the text, but for those that leave something out (...) or stand for it (N)."""
    shown = {}
    for page in [*PAGES, *ROOT.glob("notebooks/*.ipynb")]:
        text = page.read_text() if page.suffix == ".md" else notebook_text(page)
        for span in re.findall(r"`([a-z_]+: \{[^`]+\})`", re.sub(r"(?ms)^ *```.*?^ *```", "", text)):
            if "..." not in span and not re.search(r"\bN\b", span):
                shown.setdefault(" ".join(span.split()), set()).add(page.name)
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    whole = {span for span in shown if set(yaml.safe_load(span)) <= fields}
    for span in whole - {"method: {objective: grpo_tight}"}:  # which docs/extending.md adds
        build(RunConfig, yaml.safe_load(span), "")
    assert len(whole) > 15
    assert {page for span in whole if "megablocks" in span for page in shown[span]} == {"README.md", "megablocks.md"}


def notebook_text(page):
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_the_studies_page_names_the_cold_starts_that_may_take_longer():
    """All others may take 1,500 steps."""
    page = (ROOT / "experiments/README.md").read_text()
    limits = {1500: set()}
    for file in ROOT.glob("experiments/*.yaml"):
        start = (yaml.safe_load(file.read_text())["base"].get("model") or {}).get("cold_start") or {}
        if "until_reward" in start:
            limits.setdefault(start["steps"], set()).add(file.stem)
    said = re.search(r"`cold_start\.steps` \((1,500; [^)]+)\) is an error", page)[1]
    told = {
        int(n.replace(",", "")): set(re.findall(r"`(\w+)`", of))
        for n, of in re.findall(r"([\d,]+) in ((?:`\w+`|[^\d`])+)", said)
    }
    assert told == {steps: names for steps, names in limits.items() if steps != 1500}


def test_studies_that_share_cold_starts_do_not_both_call_them_their_own():
    lines = dict(re.findall(r"(?m)^\| \[`(\w+)`\](.*)", (ROOT / "experiments/README.md").read_text()))
    own = [name for name, row in lines.items() if re.search(r"seeds of (their|its) own", row)]
    of: dict[str, set[str]] = {}
    for name in own:
        environment = ROOT / "docs/results" / name / "env.json"
        if environment.exists():
            for digest in json.loads(environment.read_text())["by_run"].get("weights_sha256", {}).values():
                of.setdefault(digest, set()).add(name)
    assert len(of) > 300 and not {tuple(sorted(names)) for names in of.values() if len(names) > 1}


def test_pages_count_the_studies_of_other_tasks():
    """Than chains of equations; those of large models have not been run."""
    tasks = [yaml.safe_load(file.read_text())["base"]["task"]["name"] for file in ROOT.glob("experiments/*.yaml")]
    tens, ones = divmod(sum(task not in ("mod_chain", "jsonl") for task in tasks), 10)
    names = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    count = f"{ {3: 'Thirty', 4: 'Forty', 5: 'Fifty'}[tens] }-{names[ones]}".strip("-")
    for page in ("README.md", "docs/results.md"):
        assert f"{count} studies have " in (ROOT / page).read_text(), f"{page}: {count} study files have another task"
