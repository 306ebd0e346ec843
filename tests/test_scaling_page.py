"""The memory arithmetic of docs/scaling.md, from the model's shapes."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from moe_rl.cli import main
from moe_rl.policy.models import ModelConfig
from moe_rl.routing.sites import find_sites
from moe_rl.study.config import load_study
from moe_rl.study.memory import architecture, meta_model, plan

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "scaling.md").read_text().split())


def test_memory_of_qwen3_30b_a3b():
    model = meta_model(architecture(ModelConfig(path="Qwen/Qwen3-30B-A3B-Base")), torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    study = load_study(ROOT / "experiments" / "qwen3_30b_a3b.yaml")
    need = plan(study.resolve("gspo", 0), devices=8)
    row = f"| {count:,} | {len(find_sites(model))} | {layer / 1e6:.1f} M parameters | {need.routes_bytes_per_token} B"
    assert row in PAGE and f"| {need.kv_bytes_per_token:,} B per token |" in PAGE
    states = re.findall(r"\| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \|", PAGE)
    assert [int(size) for size, _, _ in states] == [16, 16, 8, 2]
    for size, total, each in states:
        assert total == f"{int(size) * count / 1e9:.1f}" and each == f"{int(size) * count / 8e9:.1f}"
    # The settings of the study file: weights 2, gradients 2, master weights and Adam 12 bytes for each parameter.
    held = sum(n.bytes for n in need.needs if n.name in ("policy weights", "optimizer", "gradients"))
    assert f"{held / 1e9:.1f}" == "61.1"
    tokens = 128 * 16 * (need.prompt_tokens + need.new_tokens)
    assert f"2048 responses of {need.prompt_tokens + need.new_tokens} tokens are {tokens * 384 / 1e9:.1f} GB" in PAGE
    assert f"(8k tokens x 151,936 would be {8192 * 151_936 * 4 / 1e9:.1f} GB in fp32" in PAGE
    assert f"40 GB are {40e9 / need.kv_bytes_per_token / 1e3:.0f}k tokens" in PAGE
    assert f"{16 * count / 4e9:.1f} GB each before" in PAGE
    assert f"{2 * count / 1e9:.0f} GB in bf16 ({4 * count / 1e9:.0f} GB in fp32)" in PAGE
    assert need.host_bytes == 12 * count
    assert f"the optimizer's is {12 * count / 1e9:.0f} GB" in PAGE
    assert f"gathered layers ({2 * layer / 1e9:.1f} GB each in bf16" in PAGE


def test_the_table_beyond():
    """Column by column, from the shapes."""
    section = (ROOT / "docs" / "scaling.md").read_text().split("## Beyond")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines()]
    columns = list(zip(*(map(str.strip, row) for row in rows if len(row) == 2), strict=True))
    assert len(columns) == 2
    for name, *found in (column[:1] + column[2:] for column in columns):
        hf = architecture(ModelConfig(path=f"Qwen/{name}"))
        model = meta_model(hf, torch.bfloat16)
        count, sites = sum(p.numel() for p in model.parameters()), len(find_sites(model))
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        routes = sites * hf.num_experts_per_tok  # ids of 128 experts take a byte each
        assert found == [
            f"{count:,}",
            f"{16 * count / 64e9:.1f} GB",
            f"{16 * count / 128e9:.1f} GB",
            f"{2 * layer / 1e9:.1f} GB",
            str(sites),
            f"{routes} B per token",
            f"{2048 * 4352 * routes / 1e9:.1f} GB",
            f"{2 * 2 * hf.num_hidden_layers * hf.num_key_value_heads * hf.head_dim:,} B per token",
            f"{12 * count / 1e9:,.0f} GB",
        ]
    assert f"at most {1e12 / 12e9:.0f} B parameters" in PAGE and f"gathers {2 * count / 1e9:.0f} GB of bf16" in PAGE


def test_times_are_those_of_the_benchmark():
    parts = json.loads((ROOT / "docs" / "results" / "benchmarks.json").read_text())
    rows = {row["case"]: row for row in next(part["rows"] for part in parts if part["name"] == "change_metrics")}
    tokens = 2048 * 4352
    for sites in (48, 94):
        assert f"{tokens * sites / 1e6:.0f} M rows" in PAGE
        for case in ("ascending, 10 %", "other order, 10 %"):
            row = rows[f"change_counts, {case}"]
            compared = int(row["note"].split(" rows")[0].replace(",", ""))
            assert f"{tokens * sites * 1e-6 * row['us'] / compared:.1f} s" in PAGE


def test_commands_of_the_page_are_the_command_lines_own(capsys):
    with pytest.raises(SystemExit):
        main(["run", str(ROOT / "experiments" / "quick.yaml"), "--help-all"])
    options = capsys.readouterr().out
    for option in set(re.findall(r"--(?:distributed|model)\.[a-z0-9.-]+", PAGE)):
        assert option in options, option


def test_the_table_of_route_sizes_is_the_benchmarks_own(monkeypatch):
    """Sizes in memory and on the wire from shapes; limits by hand; routes on disk within a tenth of their limit."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import route_storage

    page = (ROOT / "docs" / "scaling.md").read_text()
    lines = page.split(route_storage.BEGIN)[1].split(route_storage.END)[0].strip().splitlines()
    cells = {
        line.split(" | ")[0].removeprefix("| "): re.findall(r"[\d,]+(?= |$)", line.split(" | ", 1)[1]) for line in lines
    }
    numbers = {name: [float(x.replace(",", "")) for x in row] for name, row in cells.items()}
    each = [route_storage.shipped(shape) for shape in route_storage.SHAPES]
    for name in each[0]:
        assert numbers[name] == [round(one[name]) for one in each], name
    assert numbers["naive: int64 tensor `[B,T,L,K]`"] == [48 * 8 * 8, 58 * 8 * 8]
    limits = [math.log2(math.comb(experts, 8)) * sites / 8 for sites, experts in ((48, 128), (58, 256))]
    assert numbers["limit of a policy, log2 C(E, K) a row"] == [round(limit) for limit in limits]
    ratios = {name: re.findall(r"\(([\d.]+) x limit\)", line) for name, line in zip(cells, lines, strict=True)}
    small = "its route table on disk, a file of 4,096 tokens"
    most = {name: 1.2 if name == small else 1.1 for name, found in ratios.items() if found}
    assert len(most) == 4 and all(1 <= float(x) <= most[name] for name in most for x in ratios[name]), ratios
