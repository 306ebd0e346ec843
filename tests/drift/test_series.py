"""moe-rl drift over several checkpoints, swapped routers, and the inline views."""

import copy
import json

import matplotlib
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from drift_models import TEXTS, build, moved, padded, refused, save, stands_alone
from matplotlib.figure import Figure

from moe_rl.cli import main
from moe_rl.drift import plot, series
from moe_rl.drift.checkpoints import chosen
from moe_rl.drift.errors import DriftError
from moe_rl.drift.gates import gates_of, with_gates
from moe_rl.drift.options import DriftOptions
from moe_rl.drift.run import run_drift
from moe_rl.drift.series import run_series
from moe_rl.drift.series_page import series_curves
from moe_rl.drift.words import pair_verdict, swap_sentence
from moe_rl.routing import RoutedExperts, change_counts, find_sites, record_routes


def stages(family, tokenizer):
    """The first; moved routers; a moved body under the same routers."""
    first = build(family, tokenizer)
    routers, body = copy.deepcopy(first), moved(first, 0.1)
    with with_gates(body, gates_of(first)):
        body = copy.deepcopy(body)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for site in find_sites(routers):
            for weight in site.module.parameters():
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return [first.eval(), routers.eval(), body.eval()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("run")
    for step, model in zip((5, 100, 20), [stages("granitemoe", tokenizer)[i] for i in (0, 2, 1)], strict=True):
        save(model, tokenizer, root / f"checkpoint-{step}")
    return root


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def routes_of(model, tokenizer):
    """Of TEXTS, padded on the right, and the mask of all but first tokens."""
    ids, real = padded(TEXTS, tokenizer)
    with torch.no_grad(), record_routes(model) as recording:
        model(input_ids=ids, attention_mask=real.long())
    return recording.routes, real & (torch.arange(ids.shape[1]) > 0)


def test_a_folder_of_checkpoints_is_a_series_in_the_order_of_its_steps(folder, prompts, tmp_path, tokenizer, capsys):
    output = tmp_path / "out"
    main(["drift", str(folder), "--prompts", str(prompts), "--output", str(output), "--batch-size", "4"])
    said = capsys.readouterr().out
    results = json.loads((output / "series.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    assert results["steps"] == [5, 20, 100] and results["complete"] is True
    first, routers, body = (routes_of(model, tokenizer)[0] for model in stages("granitemoe", tokenizer))
    mask = routes_of(stages("granitemoe", tokenizer)[0], tokenizer)[1]
    zero, one, two = results["rows"]
    assert zero["change"]["slot"]["changed"] == zero["gap"]["gap_max"] == 0 < zero["change"]["slot"]["of"]
    assert one["change"]["slot"]["changed"] == change_counts(first, routers, mask).slots_changed > 0
    assert two["change"]["token"]["changed"] == change_counts(first, body, mask).tokens_changed > 0
    assert two["step"]["site"]["changed"] == change_counts(routers, body, mask).sites_changed > 0
    # Where only routers moved, they alone do all of it, and the body nothing; and the other way round.
    assert one["gate_swap"] == {"routers": one["change"], "body": zero["change"]}
    assert two["gate_swap"] == {"routers": zero["change"], "body": two["change"]}
    assert two["gap"]["gap_mean"] > two["gap"]["gap_mean_replayed"] > 0
    table, sites = pd.read_csv(output / "series.csv"), pd.read_csv(output / "sites.csv")
    assert table["slots_changed"].tolist() == [row["change"]["slot"]["changed"] for row in results["rows"]]
    assert sites.groupby("checkpoint")["slots_changed"].sum()["checkpoint-100"] == two["change"]["slot"]["changed"]
    page = (output / "report.html").read_text()
    assert said.startswith(results["verdict"]) and results["verdict"] in page and stands_alone(page, 2)
    assert "alone" in results["swap"] and results["swap"] in said and results["swap"] in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_names_of_checkpoints_may_be_numbers(folder, prompts, tmp_path):
    for step in (5, 20, 100):
        (tmp_path / str(step)).symlink_to(folder / f"checkpoint-{step}")
    paths = tuple(str(tmp_path / str(step)) for step in (5, 20, 100))
    output = run_series(DriftOptions(paths, prompts, tmp_path / "out", gate_swap=False, floor_sequences=0))
    sites = pd.read_csv(output / "figures" / "series_sites.csv")
    assert list(dict.fromkeys(sites["checkpoint"])) == [5, 20, 100] and (output / "report.html").exists()


def test_swapped_routers_of_a_pair_with_two_models_or_one_at_a_time(folder, prompts, tmp_path, undrawn):
    for new, (routers, body) in {"checkpoint-20": (True, False), "checkpoint-100": (False, True)}.items():
        pair = [str(folder / name) for name in ("checkpoint-5", new)]
        options = [
            DriftOptions(tuple(pair), prompts, tmp_path / n, per_site=False, one_at_a_time=n == "b", floor_sequences=0)
            for n in "ab"
        ]
        results = [json.loads((run_drift(one) / "drift.json").read_text()) for one in options]
        swap = results[0]["gate_swap"]
        assert swap == results[1]["gate_swap"]
        assert [swap[name]["slot"]["changed"] > 0 for name in ("routers", "body")] == [routers, body]
        assert f"the {'routers' if routers else 'hidden states'} move the selection alone" in swap_sentence(swap)
        page = (tmp_path / "a" / "report.html").read_text()
        assert pair_verdict(results[0]) in page and swap_sentence(swap) in page


def test_other_routers_are_in_place_inside_the_block_only(tokenizer):
    model, other = stages("qwen3_moe", tokenizer)[:2]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyError), with_gates(model, gates_of(other)):
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert changed == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)}
        assert all(torch.equal(model.state_dict()[name], other.state_dict()[name]) for name in changed)
        raise KeyError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="of another architecture"), with_gates(model, {}):
        pass


def test_of_gemma_4_the_whole_router_is_swapped_and_nothing_else_of_its_layer():
    """The router, which has scales beside its matrix, is a part of the decoder layer itself, as `layer_scalar` is."""
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    shape |= {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    config = transformers.Gemma4TextConfig(**shape, enable_moe_block=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before, other = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor += 1
    with with_gates(model, gates_of(other)):
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    router = ("proj.weight", "scale", "per_expert_scale")
    assert changed == {f"model.layers.{layer}.router.{name}" for layer in (0, 1) for name in router}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


BLOCKS = {
    "MiniMaxM2": ({"num_local_experts": 4, "rotary_dim": 8}, "e_score_correction_bias"),
    "Lfm2Moe": (
        {"num_experts": 4, "num_dense_layers": 0, "moe_intermediate_size": 8, "layer_types": ["full_attention"] * 2},
        "expert_bias",
    ),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_a_selection_bias_beside_the_router_is_the_router_s(family):
    own, bias = BLOCKS[family]
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**shape, **own))
    other = copy.deepcopy(model).eval()
    for site in find_sites(other):
        getattr(site.parents[0], bias).data = torch.tensor([0.0, 9.0, 0.0, 9.0])
    inputs = torch.arange(1, 21)[None]
    with torch.no_grad(), with_gates(model.eval(), gates_of(other)), record_routes(model) as recording:
        model(input_ids=inputs)
    assert set(recording.routes.ids[0, :-1].flatten().tolist()) == {1, 3}


def test_a_series_that_is_stopped_keeps_what_it_measured(folder, prompts, tmp_path, undrawn, monkeypatch, capsys):
    load = series.checkpoints.load

    def stops(label, source, *rest):
        if source.base.endswith("-100"):
            raise KeyboardInterrupt
        return load(label, source, *rest)

    monkeypatch.setattr(series.checkpoints, "load", stops)
    error = refused(capsys, "drift", folder, "--prompts", prompts, "--output", tmp_path / "out", status=130)
    assert "OUTPUT.partial" in error and not (tmp_path / "out.partial" / "cache").exists()
    results = json.loads((tmp_path / "out.partial" / "series.json").read_text())
    assert results["complete"] is False and [row["name"] for row in results["rows"]] == [
        "checkpoint-5",
        "checkpoint-20",
    ]
    assert not (tmp_path / "out").exists()


def test_what_the_arguments_mean(folder, tmp_path, tokenizer, prompts, capsys):
    inside = [str(folder / f"checkpoint-{step}") for step in (5, 20, 100)]
    assert chosen([str(folder)]) == inside and chosen(["owner/name", inside[0]]) == ["owner/name", inside[0]]
    trainer = tmp_path / "trainer"  # a trainer's output: the last model, and checkpoints inside
    save(build("granitemoe", tokenizer), tokenizer, trainer)
    save(build("granitemoe", tokenizer), tokenizer, trainer / "checkpoint-1")
    assert chosen([str(trainer)]) == [str(trainer / "checkpoint-1"), str(trainer)]
    assert chosen([str(trainer), inside[0]]) == [str(trainer), inside[0]], "beside another it is itself"
    ours = tmp_path / "seed0"
    save(build("granitemoe", tokenizer), tokenizer, ours / "checkpoint")
    assert chosen([str(ours), inside[0]]) == [str(ours / "checkpoint"), inside[0]]
    (tmp_path / "empty").mkdir()
    (tmp_path / "arm" / "seed0" / "checkpoint").mkdir(parents=True)
    (tmp_path / "arm" / "seed0" / "checkpoint" / "config.json").write_text("{}")
    lora = [tmp_path / "lora" / f"checkpoint-{step}" for step in (9, 10)]
    for adapters in lora:
        adapters.mkdir(parents=True)
        (adapters / "adapter_config.json").write_text("{}")
    assert chosen([str(tmp_path / "lora")]) == [*map(str, lora)]
    assert chosen([inside[0], str(tmp_path / "lora")]) == [inside[0], *map(str, lora)]
    for given, message in (
        ([str(tmp_path / "empty")], r"holds no checkpoint .*right inside\)$"),
        ([str(tmp_path / "arm")], "arm holds no checkpoint .*but runs, of which one has to be named: seed0"),
        ([inside[0]], "there is only"),
        ([], "none"),
    ):
        with pytest.raises(DriftError, match=message):
            chosen(given)
    odd = save(build("granitemoe", tokenizer, experts=8), tokenizer, tmp_path / "odd")
    for paths, message in (
        ((*inside[:2], str(odd)), r"num_local_experts is 6 in checkpoint 1 \(.*\) and 8 in checkpoint 3 \(odd\)"),
        ((*inside, f"{inside[0]}/"), "names .*checkpoint-5 twice"),
    ):
        with pytest.raises(DriftError, match=message):
            run_series(DriftOptions(paths, prompts, tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_the_verdict_says_how_many_times_the_floor():
    def rates(slot, token):
        return {"slot": {"rate": slot}, "site": {"rate": slot}, "token": {"rate": token}, "gap_max": 0.0}

    results = {"old_name": "a", "new_name": "b", "change": rates(0.12, 0.45), "floor": {"variants": {}}}
    assert pair_verdict(results) == "12 % of slots and 45 % of tokens changed from a to b."
    results["floor"]["variants"] = {"repeat": rates(0.0, 0.0), "batch": rates(0.0, 0.0), "bf16": rates(0.03, 0.2)}
    assert pair_verdict(results) == (
        "12 % of slots and 45 % of tokens changed from a to b, 4 times what a bf16 copy changes (3 %) and other "
        "arithmetic at equal weights changes none."
    )
    results["floor"]["variants"]["batch"] = rates(0.06, 0.3)
    assert "2 times what other arithmetic at equal weights changes (6 %) and 4 times" in pair_verdict(results)
    swap = {"routers": rates(0.1, 0), "body": rates(0.02, 0)}
    assert swap_sentence(swap).endswith("the routers move the selection 5 times as much.")
    assert swap_sentence({"routers": rates(0.1, 0), "body": rates(0.11, 0)}).endswith("about equally.")
    assert swap_sentence({"routers": rates(0.0, 0), "body": rates(0.0, 0)}).endswith("neither moves the selection.")


def test_a_bias_of_the_experts_output_is_no_part_of_the_routers(tokenizer):
    """JetMoE's blocks hold one, as long as the hidden state."""
    model = build("jetmoe", tokenizer)
    beside = {name for site in find_sites(model) for name in site.parents[0]._parameters}
    assert "bias" in beside and not [name for name in gates_of(model) if "bias" in name]


# -- inline views --------------------------------------------------------------------------------------------------


def by_hand():
    """One sequence, three tokens, two sites, K = 2: token 1 changes one slot at site 0, both at site 1."""
    old = torch.tensor([[[[0, 1], [2, 3]]] * 3])
    new = old.clone()
    new[0, 1] = torch.tensor([[1, 4], [0, 1]])
    tokens = torch.tensor([[7, 8, 9]])
    return [RoutedExperts(ids, ["layers.0.gate", "layers.1.gate"], 5, tokens=tokens) for ids in (old, new)]


class Words:
    def decode(self, ids):
        return {7: "a ", 8: '<b title="x">&', 9: "c\n"}[ids[0]]


def test_the_heat_map_is_slots_changed_by_site_and_position_on_any_axes():
    ax = Figure().subplots()
    assert plot.change_heatmap(*by_hand(), ax=ax) is ax
    assert ax.images[0].get_array().tolist() == [[0, 50, 0], [0, 100, 0]]
    old, new = by_hand()
    part = RoutedExperts(new.ids, [f"model.{site}" for site in new.sites], 5, tokens=new.tokens)
    again = plot.change_heatmap(old, part, ax=Figure().subplots())
    assert again.images[0].get_array().tolist() == [[0, 50, 0], [0, 100, 0]], "named as in the whole model"
    assert plot.tokens(old, part, Words())._repr_html_() == plot.tokens(old, new, Words())._repr_html_()
    mask = torch.tensor([[True, False, True]])
    drawn = plot.change_heatmap(*by_hand(), ax=Figure().subplots(), mask=mask).images[0].get_array()
    assert np.ma.getmaskarray(drawn).tolist() == [[False, True, False]] * 2
    lines = plot.change_by_site(*by_hand(), ax=Figure().subplots()).lines
    sites, slots = (line.get_ydata().tolist() for line in lines)
    assert sites == pytest.approx([100 / 3] * 2) and slots == pytest.approx([100 / 6, 100 / 3])


def test_without_axes_each_view_is_a_figure_of_its_own_readable_under_any_style():
    matplotlib.use("Agg")
    with matplotlib.style.context("dark_background"):
        first, second = plot.change_heatmap(*by_hand()), plot.change_by_site(*by_hand())
        bar = first.figure.axes[1]
    assert first.figure is not second.figure and matplotlib.pyplot.gcf() is second.figure
    assert first.figure.get_facecolor() == (1, 1, 1, 1)
    inks = [label.get_color() for label in (*bar.get_yticklabels(), *second.get_legend().get_texts())]
    assert set(inks) == {"#1a1a1a"}
    matplotlib.pyplot.close("all")


def test_tokens_are_escaped_and_coloured_by_the_sites_that_changed():
    shown = plot.tokens(*by_hand(), Words())
    html = shown._repr_html_()
    assert len(repr(shown)) < 100
    assert "&lt;b title=&quot;x&quot;&gt;&amp;" in html and "<b title" not in html
    assert html.count("2 of 2 sites changed") == 1 and html.count("0 of 2 sites changed") == 2
    assert "0: 0 → 4\n1: 2, 3 → 0, 1" in html and "rgba(213,94,0,0.85)" in html.split("2 of 2 sites")[1]
    assert plot.tokens(*by_hand(), Words(), mask=torch.tensor([[True, False, False]])).html.count("<span title") == 1
    bare = [RoutedExperts(routes.ids, routes.sites, 5) for routes in by_hand()]
    with pytest.raises(ValueError, match="do not know their tokens"):
        plot.tokens(*bare, Words())


@pytest.mark.parametrize("moved", [(0.0, 0.1, 0.13), (0.0, 0.13, 0.01), (0.0, 0.0, 0.0)])
def test_the_legends_of_a_series_lie_on_no_curve(moved):
    def rates(rate):
        return {level: {"rate": rate, "changed": 1, "of": 10} for level in ("slot", "site", "token")}

    rows = [
        {
            "name": f"a-long-name-as-a-hub-gives-it-to-a-checkpoint-of-step-{i:06d}",
            "change": rates(rate),
            "step": rates(rate),
            "gate_swap": {"routers": rates(rate / 2), "body": rates(rate)} if i else None,
            "gap": {"gap_mean": rate, "gap_mean_replayed": rate / 2},
        }
        for i, rate in enumerate(moved)
    ]
    figure = series_curves({"rows": rows, "steps": None, "floor": {"variants": {}}}, "").figure
    figure.draw_without_rendering()
    left, right = (ax.get_title(loc="left") and ax._left_title.get_window_extent() for ax in figure.axes[:2])
    assert left.x1 < right.x0
    for ax in figure.axes[2:]:
        box, top = ax.get_legend().get_window_extent(), max(float(max(line.get_ydata())) for line in ax.lines)
        assert ax.transData.transform((0, top))[1] < box.y0 + 1
