"""Fixtures: small studies for tests of figures; a headless browser for tests of pages, and a study served to it.

Without a browser, tests of pages are skipped on a developer's machine and fail under CI=true.
"""

import os

import pytest
from browser import NAMES, Browser, find_browser, serving
from synthetic import write_study
from token_files import write_step

from moe_rl.study import load


@pytest.fixture(scope="session")
def chromium():
    path = find_browser()
    if path is None:
        message = f"no browser found (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    browser = Browser(path)
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    chromium.complaints.clear()
    chromium.requests.clear()
    chromium.look(1400, 900)
    yield chromium
    chromium.open("about:blank")
    assert chromium.complaints == []


@pytest.fixture
def study(tmp_path):
    folder = write_study(
        tmp_path / "s",
        ("grpo", "grpo_replay", "gspo", "gspo_noise"),
        (0, 1),
        6,
        tokens_every=99,
        unfinished=(("gspo", 1),),
    )
    for path in folder.glob("*/seed*/tokens/*"):
        path.unlink()
    write_step(folder / "grpo" / "seed0", 3)
    write_step(folder / "grpo" / "seed0", 5)
    return folder


@pytest.fixture
def url(study):
    with serving(study) as address:
        yield address


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=7, sequences=6, tokens_every=3)


@pytest.fixture(scope="session")
def data(folder):
    return load(folder)


@pytest.fixture(scope="session")
def one_seed(tmp_path_factory):
    return load(write_study(tmp_path_factory.mktemp("runs") / "one", arms=("grpo", "gspo"), seeds=(0,), steps=3))
