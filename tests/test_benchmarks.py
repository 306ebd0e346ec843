"""Pages of measurements: made of what was recorded, whatever became of a part."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ROW = {
    "benchmark": "b",
    "case": "new",
    "us": 1234.5,
    "limit_us": 617.25,
    "peer": "old",
    "peer_us": 2.469e3,
    "ratio": 0.5,
    "spread": [0.4, 0.6],
    "note": "",
}


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a script of benchmarks/ by name, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def command(tmp_path, program):
    """Write `program` to a file; return the command of a part that runs it, with the file of rows as last argument."""
    path = tmp_path / f"p{len(list(tmp_path.iterdir()))}.py"
    path.write_text(program)
    return str(path)


def test_a_part_that_fails_hangs_or_cannot_run_is_said_and_the_others_go_on(benchmark, tmp_path):
    bench = benchmark("bench_page")
    write = f"import json, sys; open(sys.argv[-1], 'w').write(json.dumps({ROW!r}) + chr(10))"
    hang = "print('here', flush=True); import time; time.sleep(60)"
    parts = [
        bench.Part("good", "Good", "Works.", command(tmp_path, write), 60),
        bench.Part("bad", "Bad", "Fails.", command(tmp_path, "print('why'); raise SystemExit(3)"), 60),
        bench.Part("slow", "Slow", "Hangs.", command(tmp_path, hang), 2),
        bench.Part("none", "None", "Writes nothing.", command(tmp_path, "pass"), 60),
        bench.Part("absent", "Absent", "Needs.", "no_such_file.py", 60, needs="megablocks is not installed"),
        bench.Part("last", "Last", "Works too.", command(tmp_path, write), 60),
    ]
    record, target = tmp_path / "results" / "record.json", tmp_path / "page.md"
    record.parent.mkdir()
    order = [part.name for part in parts]
    assert not bench.run_parts(parts, order, record, target, "# Head", say=lambda text: None)
    done = json.loads(record.read_text())
    assert [part["name"] for part in done] == order
    assert [part.get("error", "").split("\n")[0] for part in done] == [
        "",
        "exit status 3",
        "stopped after 2 s",
        "no rows: FileNotFoundError",
        "",
        "",
    ]
    assert "why" in done[1]["error"] and "here" in done[2]["error"] and done[2]["seconds"] < 30
    text = target.read_text()
    assert text == bench.page("# Head", done)
    assert "**Failed:** Bad; Slow; None." in text and "Skipped: megablocks is not installed" in text
    assert "| new | 1,234 | 617 | 2.00 | old | 2,469 | 0.500 | [0.400, 0.600] |" in text and text.count("| new |") == 2
    assert "python no_such_file.py" in text and f"torch {version('torch')}" in text


def test_parts_that_are_not_run_again_stay(benchmark, tmp_path):
    bench = benchmark("bench_page")
    order = ["a", "b", "c"]
    for part in ({"name": "b", "rows": [ROW]}, {"name": "c", "rows": []}, {"name": "a", "rows": []}):
        found = bench.keep(tmp_path / "r.json", part, order)
    assert [(part["name"], len(part["rows"])) for part in found] == [("a", 0), ("b", 1), ("c", 0)]
    again = bench.keep(tmp_path / "r.json", {"name": "a", "rows": [ROW, ROW]}, order)
    assert [len(part["rows"]) for part in again] == [2, 1, 0]
    assert again == json.loads((tmp_path / "r.json").read_text())


def test_a_part_that_cannot_run_here_stays_as_it_was_recorded(benchmark, tmp_path):
    bench = benchmark("bench_page")
    record, target = tmp_path / "r.json", tmp_path / "page.md"
    part = bench.Part("trl", "T", "About.", command(tmp_path, ""), 60, needs="trl is not installed")
    bench.keep(record, {"name": "trl", "rows": [ROW]}, ["trl"])
    said = []
    assert bench.run_parts([part], ["trl"], record, target, "# Head", say=said.append)
    assert [one["rows"] for one in json.loads(record.read_text())] == [[ROW]] and not target.exists()
    assert said[-1] == "trl: what was recorded of it stays"


def test_a_damaged_record_is_said_before_anything_is_measured(benchmark, tmp_path):
    bench = benchmark("bench_page")
    record, ran = tmp_path / "r.json", tmp_path / "ran"
    record.write_text('[{"name": "a"')
    part = bench.Part("a", "A", "About.", command(tmp_path, f"open({str(ran)!r}, 'w')"), 60)
    with pytest.raises(SystemExit, match=r"r.json: not JSON .*; restore it, or remove it and measure all parts"):
        bench.run_parts([part], ["a"], record, tmp_path / "page.md", "# Head", say=lambda text: None)
    assert not ran.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_what_a_part_started_ends_with_a_benchmark_that_is_ended(tmp_path):
    import fcntl

    part, lock = tmp_path / "part.py", tmp_path / "lock"
    hang = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(120)"
    part.write_text(hang.replace("time.sleep", "print('held', file=f, flush=True); time.sleep"))
    program = f"""
import argparse, bench_page, sys
from pathlib import Path
part = bench_page.Part("a", "A", "About.", {f"{part} {lock}"!r}, 120)
options = argparse.Namespace(output=Path({str(tmp_path)!r}), only=["a"])
bench_page.run_chosen([part], options, "page", "# Head")
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths})
    try:
        while not (lock.exists() and lock.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 143
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the part is over, and let go of it
    finally:
        process.kill()


@pytest.mark.parametrize("name", ["ppo_vs_grpo", "two_versions"])
def test_cpu_seconds_are_of_policies_on_the_cpu(benchmark, monkeypatch, name):
    """By default a policy goes to a GPU where there is one, and CPU time is then that of launching its kernels."""
    if name == "two_versions":
        assert benchmark(name).SETTINGS["model"]["device"] == "cpu"
        return

    def begin(config, folder):
        raise RuntimeError(config.model.device)

    monkeypatch.setattr(benchmark(name), "begin", begin)
    with pytest.raises(RuntimeError, match="cpu"):
        main_of(benchmark, monkeypatch, name)


def main_of(benchmark, monkeypatch, name, *words):
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, words)])
    benchmark(name).main()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("router_calls", ["--tokens", "64", "100"], "--tokens: up to 64, or rows of 64; got 100"),
        ("route_storage", ["--tokens", "6"], "--tokens: of 4 sequences of one length, got 6"),
        ("logprobs", ["--tokens", "20"], "--tokens: a multiple of 8, the sequences that they come in; got 20"),
        ("router_calls", ["--rounds", "3"], "--rounds: at least 4, got 3"),
        ("routing_overhead", ["--no-gpu", "--rounds", "1"], "--rounds: at least 4, got 1"),
        ("against_trl", ["--rounds", "0"], "--rounds: at least 1, got 0"),
        ("cost", ["--rounds", "few"], "--rounds: invalid number value: 'few'"),
    ],
)
def test_sizes_that_would_be_another_and_too_few_rounds_are_refused(
    benchmark, monkeypatch, capsys, name, words, message
):
    """Else 100 tokens would be 64, and one round would resolve any difference."""
    with pytest.raises(SystemExit, match="2"):
        main_of(benchmark, monkeypatch, name, *words)
    assert message in capsys.readouterr().err


def test_our_side_of_the_comparison_with_trl_is_the_example_as_it_is(benchmark, monkeypatch):
    """Memory that is kept would be ours alone: TRL's cycle, too, is quicker with it."""
    trl = benchmark("against_trl")
    monkeypatch.setattr(trl, "PROMPTS", 2), monkeypatch.setattr(trl, "GROUP", 2), monkeypatch.setattr(trl, "UPDATES", 1)
    monkeypatch.setattr(trl.Sums, "max_new_tokens", 2)
    monkeypatch.setattr("moe_rl.processes.keep_freed_memory", lambda: pytest.fail("memory is kept on one side"))
    assert len(trl.ours(None, True, False, False, 1)) == 2


def test_the_first_round_warms_up(benchmark, monkeypatch):
    rows, now = benchmark("rows"), [0.0]
    monkeypatch.setattr(rows.time, "process_time", lambda: now[0])

    def takes(first, later):
        seconds = iter([first, later, later])

        def run():
            now[0] += next(seconds)

        return run

    seconds = rows.in_turns({"one": takes(64.0, 2.0), "other": takes(4.0, 4.0)}, 2)
    assert seconds == {"one": [2.0, 2.0], "other": [4.0, 4.0]}


def test_the_limit_of_a_comparison_is_to_read_the_bytes_that_it_reads(benchmark, monkeypatch, tmp_path):
    """An int64 id is eight times a packed one."""
    sizes = ["--tokens", 40, "--sites", 4, "--experts", 16, "--rounds", 2]
    main_of(benchmark, monkeypatch, "change_metrics", *sizes, "--json", tmp_path / "rows")
    rows = {row["case"]: row for row in map(json.loads, (tmp_path / "rows").read_text().splitlines())}
    packed, wide = rows["read both (floor)"], rows["read both of int64 ids (floor)"]
    (of_wide,) = (row for case, row in rows.items() if case.startswith("slot_change of int64 ids"))
    assert of_wide["limit_us"] == pytest.approx(wide["us"]) and "from 160 rows" not in of_wide["note"]
    assert rows["site_change, ascending, 10 %"]["limit_us"] == pytest.approx(packed["us"])


def test_the_speed_of_reading_a_part_is_of_the_bytes_of_that_part(benchmark, monkeypatch, tmp_path):
    storage = benchmark("route_storage")
    monkeypatch.setattr(storage, "SHAPES", (storage.Shape("small", 5, 5, 16, 2),))
    main_of(benchmark, monkeypatch, "route_storage", "--tokens", 400, "--rounds", 1, "--json", tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    megabytes = {row["case"].partition(": ")[2]: float(row["note"].split()[0]) for row in rows}
    whole = 400 * 5 * 2 / 1e6
    assert megabytes["read routes"] == pytest.approx(whole)
    assert megabytes["read one of four sequences"] == pytest.approx(whole / 4)
    assert megabytes["read one site"] == pytest.approx(whole / 5)


def test_neither_side_of_the_runs_of_a_gpu_makes_the_cold_start(benchmark, monkeypatch, tmp_path):
    runs, calls = benchmark("gpu_runs"), []
    monkeypatch.setattr(runs, "moe_rl", lambda *words, torchrun=False: calls.append(words) or 1.0)
    monkeypatch.setattr(runs, "losses", lambda folder: [0.5])
    (row,) = runs.fsdp2(tmp_path, "cpu", 4)
    asked = [dict(zip(words[2::2], words[3::2], strict=True)) for words in calls]
    assert [one["--output"].name for one in asked] == ["before", "one", "fsdp2"]
    assert [one["--optim.steps"] for one in asked] == [1, 4, 4] and len({one["--cold-starts"] for one in asked}) == 1
    assert row["ratio"] == 1 and row["note"].startswith("wall clock")


def test_pages_and_rows_are_written_whole_or_not_at_all():
    writers = [*ROOT.glob("benchmarks/*.py"), ROOT / "tests" / "reliability" / "page.py"]
    assert len(writers) > 10
    assert not [path.name for path in writers if re.search(r"\.write_(text|bytes)\(", path.read_text())]


def test_the_committed_page_is_what_was_recorded(benchmark):
    """No number in it is edited by hand."""
    found = json.loads((ROOT / "docs" / "results" / "benchmarks.json").read_text())
    page = benchmark("bench_page").page(benchmark("bench").HEAD, found)
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page
    rows = [row for part in found for row in part["rows"]]
    assert rows and all(row.keys() == ROW.keys() for row in rows)
    assert all(set(part) >= {"command", "seconds", "load", "machine"} for part in found)


def test_every_benchmark_is_run_and_together_in_time(benchmark):
    bench, gpu = benchmark("bench"), benchmark("gpu")
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "= command_line(" in path.read_text()}
    assert len({part.name for part in bench.parts()}) == len(bench.parts())
    run = {part.command.split()[0].split("/")[1] for part in (*bench.parts(), *gpu.parts(megablocks=True))}
    assert run == scripts >= {"against_trl.py", "cost.py", "experts.py", "host_syncs.py", "routing_overhead.py"}
    assert sum(part.seconds for part in gpu.parts(megablocks=True)) < 30 * 60
    assert "not installed" in next(p.needs for p in gpu.parts(megablocks=False) if p.name == "megablocks")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_nothing_is_run_or_written(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--output", str(tmp_path / "docs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "sees no GPU here; nothing was run or written" in done.stderr
    assert not (tmp_path / "docs").exists()


@pytest.mark.skipif(not shutil.which("make") or shutil.which("nvidia-smi"), reason="needs make, and no GPU")
def test_make_gpu_installs_nothing_where_there_is_no_gpu(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(["make", "gpu"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "no NVIDIA GPU on this machine" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_says_what_to_do_about_an_old_python(tmp_path):
    """A Mac's own python3 is 3.9, and a later venv over the one it made keeps its python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / ".venv" / "bin" / "python"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\nexit 1\n")  # to whether it is new enough
    old.chmod(0o755)
    done = subprocess.run(["make", "quick", "PYTHON=true"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "older than 3.11. make clean, then make quick PYTHON=" in done.stderr


def test_a_row_holds_the_median_and_spread_of_its_ratios(benchmark):
    row = benchmark("rows").row
    three = row("b", "c", [1.0, 4.0, 6.0], "p", [2.0, 2.0, 2.0], limit=0.5)
    assert three == {
        "benchmark": "b",
        "case": "c",
        "us": 4e6,
        "limit_us": 5e5,
        "peer": "p",
        "peer_us": 2e6,
        "ratio": 2.0,
        "spread": [0.5, 3.0],
        "note": "",
    }
    assert row("b", "c", [1, 2, 3, 4, 5, 6, 7], "p", [1] * 7)["spread"] == [2, 6], "quartiles"
    assert row("b", "c", [1.0])["ratio"] is None


def test_exponents_of_known_powers(benchmark):
    cost = benchmark("cost")
    sizes = [8, 16, 32, 64]
    assert cost.exponent(sizes, [3 * x**1.5 for x in sizes]) == pytest.approx(1.5)
    low, high = cost.interval([0.9, 1.0, 1.1])
    assert (low + high) / 2 == pytest.approx(1.0) and high - low == pytest.approx(2 * 4.30265 * 0.1 / 3**0.5, rel=1e-4)


def test_what_grows_is_what_is_said_to(benchmark):
    cost = benchmark("cost")
    found = cost.sizes_of("experts")
    assert list(found) == ["forward", "record", "replay", "cycle"]
    assert all([size for size, _ in points] == [16, 32, 64, 128] for points in found.values())
    assert [size for size, _ in cost.sizes_of("group size")["cycle"]] == [4, 8, 16, 32]


def test_waits_of_the_host_are_counted_by_place(benchmark):
    """By torch's own warning: on a CPU there are none, so the words are given here."""
    syncs = benchmark("host_syncs")
    with syncs.waits("cpu") as found:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert found.total() == 3 and next(iter(found)).startswith("test_benchmarks.py:")
    for name, call in syncs.calls("cpu", "eager", layers=2, tokens=16).items():
        with syncs.waits("cpu") as found:
            call()
        assert not found, name


def test_outcomes_of_tests_are_read_from_their_report(benchmark):
    report = """<testsuites><testsuite>
      <testcase classname="tests.a" name="one" time="0.5"/>
      <testcase classname="tests.a" name="two" time="0"><skipped message="no&#10;GPU">x</skipped></testcase>
      <testcase classname="tests.a" name="three" time="2"><system-out/><failure message="1 != 2"/></testcase>
    </testsuite></testsuites>"""
    rows = benchmark("gpu_tests").outcomes(report)
    assert [row["note"] for row in rows] == ["passed", "skipped: no GPU", "failure: 1 != 2"]
    assert rows[0]["us"] == 5e5 and rows[0]["case"] == "tests.a::one"


@pytest.mark.filterwarnings("error::FutureWarning")  # a name of the past is looked up within the times
def test_overheads_of_a_gpu_are_measured_by_the_same_code(benchmark):
    """A shape as small as a test affords stands for the GPU's."""
    overhead = benchmark("routing_overhead")
    config = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024}
    rows = overhead.compare_shape("tiny", config, layers=2, rounds=2, device="cpu", length=8)
    cases = [row["case"] for row in rows]
    assert len(cases) == 3 * (len(overhead.VARIANTS) - 1) and any("prefill 8 x 8: record" in case for case in cases)
    assert all(row["ratio"] > 0 and row["peer"] == "plain" for row in rows)


@pytest.mark.slow
@pytest.mark.sweep
def test_runs_on_a_gpu_are_compared_as_they_would_be_there(benchmark, tmp_path):
    runs = benchmark("gpu_runs")
    small = ["--model.cold-start.steps", "2", "--rollout.prompts", "4", "--eval.prompts", "4", "--probe.sequences", "4"]
    small += ["--model.cold-start.until-reward", "None"]
    found = runs.fsdp2(tmp_path, "cpu", 1, small)
    gap, size = (float(x) for x in re.findall(r"[\d.]+e[-+]\d+", found[0]["note"]))
    assert found[0]["note"].startswith("wall clock; 4 updates; losses differ by at most") and gap <= 2e-4 * size


def test_two_versions_take_steps_in_turns(tmp_path):
    """A checkout against a copy with other settings, so small that both sides take seconds; each imports its own."""
    shutil.copytree(ROOT / "moe_rl", tmp_path / "moe_rl", ignore=shutil.ignore_patterns("__pycache__"))
    small = "--set model.tiny.hidden_size=16 --set model.tiny.num_layers=1 --set model.cold_start=null"
    sizes = "--set rollout.prompts=2 --set rollout.group_size=2 --set optim.num_minibatches=2 --set probe.every=0"
    script, here = "benchmarks/two_versions.py", [".", str(tmp_path)]
    command = [sys.executable, script, *here, "--steps", "4", *small.split(), *sizes.split()]
    done = subprocess.run([*command, "--set-b", "rollout.scoring=decoding"], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"b / a: \d\.\d{3} \[.+\] over 2 pairs; of the sums \d", done.stdout), done.stderr
    missing = subprocess.run([*command[:2], "/nowhere", "."], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2 and "/nowhere is no checkout of moe_rl" in missing.stderr
