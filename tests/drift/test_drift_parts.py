"""The text of a comparison, and what is counted of it, by hand."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from moe_rl.drift.checkpoints import Checkpoints
from moe_rl.drift.errors import DriftError
from moe_rl.drift.passes import Measured
from moe_rl.drift.prompt_files import KEYS, kind_of
from moe_rl.drift.prompts import Example, Text, TextBatch, aligned, check_file, question, tokenised
from moe_rl.drift.sums import _bins, _median, count
from moe_rl.measure.decompose import Decomposition
from moe_rl.measure.scoring import TokenBatch
from moe_rl.policy.tiny import char_tokenizer
from moe_rl.routing import RoutedExperts

TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    made = char_tokenizer("abcdefgh<>")
    made.chat_template = TEMPLATE
    return made


def text_of(path, tokenizer, vocabulary=64, max_tokens=9):
    return Text(path, Checkpoints(tokenizer, vocabulary, "", (), 0, None, ()), max_tokens, batch_size=2)


def spelled(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(
    ("row", "before", "measured"),
    [
        ({"text": "abcd"}, "a", "bcd"),
        ({"prompt": "abcd"}, "a", "bcd"),
        ({"prompt": "ab", "completion": "cd"}, "ab", "cd"),
        ({"prompt": "", "completion": "cd"}, "c", "d"),
        ({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}, "<ab>", "cd"),
        ({"messages": [{"role": "user", "content": "ab"}]}, "<", "ab"),
        ({"prompt": [{"role": "user", "content": "ab"}], "completion": "cd"}, "<ab>", "cd"),
        ({"messages": [{"role": "user", "content": "ab"}], "completion": "cd"}, "<ab>", "cd"),
        ({"messages": [{"role": "user", "content": "ab"}], "prompt": "x", "completion": "cd"}, "<ab>", "cd"),
        (
            {
                "prompt": [{"role": "user", "content": "ab"}],
                "completion": [{"role": "assistant", "content": "cd"}],
            },
            "<ab>",
            "cd",
        ),
    ],
)
def test_every_form_of_a_line_and_what_is_measured_of_it(row, before, measured, tokenizer, tmp_path):
    ids, start = tokenised(row, tokenizer)
    assert (spelled(tokenizer, ids[:start]), spelled(tokenizer, ids[start:])) == (before, measured)
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row))
    assert check_file(path, tokenizer).kinds == {kind_of(row): 1}


def test_an_empty_prompt_has_the_token_that_a_tokenizer_begins_every_text_with():
    def begins(text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    assert tokenised({"prompt": "", "completion": "cd"}, begins) == ([1, 99, 100], 1), "as a sampler would encode it"
    assert question({"prompt": ""}, begins) == ([1], 1)


def test_of_a_template_that_leaves_out_past_thoughts_the_answer_alone_is_measured(tokenizer):
    thinking = char_tokenizer("abcdefgh<>")
    thinking.chat_template = TEMPLATE.replace("%}>{% endif", "%}>h{% endif")  # an answer would begin with a thought
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    ids, start = tokenised(row, thinking)
    assert (spelled(thinking, ids[:start]), spelled(thinking, ids[start:])) == ("<ab", ">cd")
    thinking.chat_template = "{% if messages[-1].role == 'assistant' %}h{% endif %}" + TEMPLATE
    with pytest.raises(DriftError, match="where the answer begins is not known"):
        tokenised(row, thinking)


def test_an_end_token_of_a_prompt_stays_and_one_that_the_tokenizer_adds_goes():
    plain, ending = char_tokenizer("abcdefgh<>"), char_tokenizer("abcdefgh<>")
    end, token = plain.eos_token_id, plain.eos_token
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="$A end", special_tokens=[("end", end)])
    a, b = plain("ab")["input_ids"]
    assert ending("ab")["input_ids"] == [a, b, end]
    for tokenizer in (plain, ending):
        for prompt, ids in (("ab", [a, b]), (f"ab{token}", [a, b, end])):
            assert question({"prompt": prompt}, tokenizer) == (ids, len(ids))
            assert tokenised({"prompt": prompt, "completion": "a"}, tokenizer) == ([*ids, a], len(ids))


def test_a_token_that_the_model_does_not_embed_is_named_by_its_line(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc\nabh")
    last = tokenizer.convert_tokens_to_ids("h")
    with pytest.raises(DriftError, match=rf"line 2 has token {last} \('h'\), and the model embeds {last} tokens"):
        list(text_of(path, tokenizer, last).examples())
    assert len(list(text_of(path, tokenizer, last + 1).examples())) == 2


def test_lines_are_cut_counted_and_padded_on_the_right(tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [
        {"text": "abcdef"},
        {"text": "a"},
        {"prompt": "abcde", "completion": "f"},
        {"prompt": "ab", "completion": "c"},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(map(json.dumps, rows)).encode())  # a byte-order mark, empty lines
    read = text_of(path, tokenizer, max_tokens=4)
    found = list(read.batches())
    assert (read.truncated, read.empty) == (2, 2), "both long lines are cut, and one keeps no completion"
    assert [batch.lines for batch in found] == [[1, 7]] and read.number == 4
    text = found[0].text
    assert text.attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert text.completion_mask.tolist() == [[False, True, True, True], [False, False, True, False]]
    assert spelled(tokenizer, text.input_ids[0].tolist()) == "abcd"
    with pytest.raises(DriftError, match="no file"):
        check_file(tmp_path / "nowhere", tokenizer)


def test_a_prompt_is_known_again_wherever_it_stands(tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [
        {"prompt": "ab", "completion": "c"},
        {"text": "abc"},
        {"prompt": "ab", "completion": "dd"},
        {"text": "abd"},
        {"prompt_ids": tokenizer("ab")["input_ids"], "completion_ids": [3]},
        {"prompt": "abc"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = text_of(path, tokenizer)
    read.batch_size = 4
    first, second = read.batches()
    assert first.prompts == [1, 2, 1, 4] and second.prompts == [1, 2], "of a text all is what is asked"
    assert [example.prompt for example in read.questions(1)] == [1, 2, 1, 4, 1, 2]


def test_plain_text_and_parquet_are_read_as_their_jsonl(tokenizer, tmp_path):
    rows = [{"text": "abcd"}, {"prompt": "ab", "completion": "c"}, {"messages": [{"role": "user", "content": "ab"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist([dict.fromkeys(KEYS) | row for row in rows]), tmp_path / "a.parquet")
    found = [list(text_of(tmp_path / name, tokenizer).examples()) for name in ("a.jsonl", "a.parquet")]
    assert found[0] == found[1] and len(found[0]) == 3
    assert sum(check_file(tmp_path / "a.parquet", tokenizer).kinds.values()) == 3
    (tmp_path / "a.txt").write_bytes("\ufeffabcd\r\n\n{bc\n".encode())  # a brace makes no JSON of it
    with pytest.raises(DriftError, match=r"a\.txt line 3 cannot be tokenised: .*: it lacks '\{'"):
        list(text_of(tmp_path / "a.txt", tokenizer).examples())
    (tmp_path / "a.txt").write_bytes(b"abcd\r\n\nbc")
    plain = list(text_of(tmp_path / "a.txt", tokenizer).examples())
    assert [(e.line, spelled(tokenizer, e.ids), e.start) for e in plain] == [(1, "abcd", 1), (3, "bc", 1)]


def test_tables_that_cannot_be_read_are_named(tokenizer, tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DriftError, match=r"a\.parquet cannot be read as Parquet"):
        check_file(path, tokenizer)
    pq.write_table(pa.table({"text": ["abcd"] * 99}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\xff" * 20 + whole[40:])  # of a page: pyarrow raises OSError
    with pytest.raises(DriftError, match=r"a\.parquet cannot be read as Parquet"):
        check_file(path, tokenizer)
    pq.write_table(pa.table({"question": ["ab"]}), path)
    with pytest.raises(DriftError, match=r"none of the columns text, prompt, completion, messages, .* \('question'\)"):
        check_file(path, tokenizer)
    pq.write_table(pa.table({"text": ["ab", None]}), path)
    with pytest.raises(DriftError, match="row 2: none of the keys"):
        check_file(path, tokenizer)


@pytest.mark.parametrize("first", [{"text": "ab"}, {"prompt_ids": [3], "completion_ids": [4]}])
def test_tokens_of_two_temperatures_are_not_scored_at_one(first, tokenizer, tmp_path):
    path, cold = tmp_path / "a.jsonl", {"prompt_ids": [3], "completion_ids": [4], "temperature": 0.7}
    path.write_text("\n".join(map(json.dumps, [cold, cold, first])))
    with pytest.raises(DriftError, match=r"a\.jsonl line 3: tokens sampled at another temperature .*\(0\.7, 1\.0\)"):
        check_file(path, tokenizer)


def test_a_trainers_layout_ends_all_prompts_in_one_column(tokenizer):
    text = aligned([Example(1, [3, 4, 5, 6], 1), Example(2, [7, 8, 9], 2)], 0)
    assert text.input_ids.tolist() == [[0, 3, 4, 5, 6], [7, 8, 9, 0, 0]]
    assert text.attention_mask.int().tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert text.completion_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]


def measured_by_hand(*prompts, scale=1.0):
    """Two sequences, of these two prompts, two sites, K = 2 of 4 experts. `.` is a prompt token or padding.

    sequence 0 (tokens 1, 2 measured): token 0 changes one slot at site 0; token 1 changes one at each site;
                                       token 2 changes both slots at site 1
    sequence 1 (token 1 measured):     nothing changes
    """
    same = [[0, 1], [0, 1]]
    old = torch.tensor([[same, same, same], [same, same, same]])
    new = old.clone()
    new[0, 0, 0] = torch.tensor([0, 2])
    new[0, 1, 0], new[0, 1, 1] = torch.tensor([1, 3]), torch.tensor([2, 1])
    new[0, 2, 1] = torch.tensor([2, 3])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    names = ["layers.0.gate", "layers.1.gate"]
    routes = [RoutedExperts(ids, names, 4) for ids in (old, new)]
    corners = torch.zeros(4, 2, 3, dtype=torch.float64)  # old, new weights, new routes, new
    corners[1, 0, 1], corners[2, 0, 1], corners[3, 0, 1] = 1.0, 2.0, 4.0  # weight 1, routing 2, interaction 1
    corners[1, 0, 2], corners[3, 0, 2] = -1.0, -1.0
    parts = Decomposition(*(scale * corners), mask=mask, old_routes=routes[0], new_routes_taken=routes[1])
    margins = torch.full((2, 3, 2), 0.5)
    margins[0, 1] = 0.001
    ids = torch.arange(6).view(2, 3)
    return Measured(
        TextBatch([3, 8], prompts, TokenBatch(ids, torch.ones(2, 3, dtype=torch.bool), mask)), parts, margins
    )


def test_counts_and_rates_by_hand():
    sums, rows = count(measured_by_hand(3, 8))
    # measured tokens 3, slots 12, sites 6; slots changed 1 + 1 + 2 = 4, sites 2 + 1 = 3, tokens 2
    rates = sums.rates()
    assert [(rates[n]["changed"], rates[n]["of"]) for n in ("slot", "site", "token")] == [(4, 12), (3, 6), (2, 3)]
    # Two clusters, (slots, tokens) = (4, 2), (0, 1), say next to nothing: Student's t of one degree of freedom is 12.7.
    assert (rates["slot"]["low"], rates["slot"]["high"]) == (0, 1)
    # The same again of two other prompts, four clusters: mean tokens 1.5, slope 4/3; residuals 4 - 8/3 and 0 - 4/3, so
    # ±4/3; their variance 4 * 16/9 / 3; half width 3.1824 * sqrt(64/27 / 4) / 1.5 per token, / 4 slots = 0.408.
    twice = sums + count(measured_by_hand(9, 10))[0]
    assert twice.rates()["slot"]["high"] == pytest.approx(4 / 12 + 3.18245 * (16 / 27) ** 0.5 / 1.5 / 4, rel=1e-5)
    # Sequences of one prompt are one cluster: (12, 6), (0, 3), (4, 3), with residuals 4, -4, 0 and mean tokens 4.
    three = sums + sums + sums + count(measured_by_hand(9, 9))[0]
    assert three.prompts.count == 3
    assert three.rates()["slot"]["high"] == pytest.approx(4 / 12 + 4.30265 * (16 / 3) ** 0.5 / 4 / 4, rel=1e-5)
    assert np.isnan(count(measured_by_hand(3, 3))[0].rates()["slot"]["high"])
    assert rows["line"].tolist() == [3, 3, 8] and rows["position"].tolist() == [0, 1, 0]
    assert rows["token"].tolist() == [1, 2, 4] and rows["slots_changed"].tolist() == [2, 2, 0]
    assert rows["flips"].tolist() == [2, 1, 0] and rows["flips_before"].tolist() == [1, 2, 0]
    assert rows["smallest_margin"].tolist() == pytest.approx([0.001, 0.5, 0.5])
    assert rows["interaction"].tolist() == [1, 0, 0]
    sites = sums.sites()
    assert sites["slots_changed"].tolist() == [1, 3] and sites["tokens_changed"].tolist() == [1, 2]
    # Load of site 0: old (3, 3, 0, 0); new: 1,3 for one token: (2, 3, 0, 1): shares move by 1/6.
    assert sums.experts()["new"].tolist()[:4] == [2, 3, 0, 1]
    assert sites["load_moved"].tolist()[0] == pytest.approx(1 / 6)
    positions = sums.by_position()
    assert positions["tokens"].tolist() == [2, 1] and positions["slots_changed"].tolist() == [2, 2]
    assert positions["tokens_changed"].tolist() == [1, 1] and positions["sites"].tolist() == [4, 2]
    margins = sums.by_margin()
    assert margins["choices"].tolist() == [2, 4] and margins["changed"].tolist() == [2, 1]
    assert (margins["low"][0] <= 0.001 < margins["high"][0]) or np.isclose(margins["low"][0], 0.001)


def test_sites_that_choose_all_experts_have_no_margin():
    measured = measured_by_hand(3, 8)
    measured.margins[...] = float("inf")
    sums, _ = count(measured)
    assert sums.by_margin().empty and sums.sites()["margin_median"].isna().all()


def test_log_ratios_by_hand():
    sums, _ = count(measured_by_hand(3, 8))
    # log r = 4, -1, 0; k1 = -1; k3 = mean(e^4 - 5, e^-1, 0)
    kl = sums.kl()
    assert kl["k1_natural"] == pytest.approx(-1)
    assert kl["k3_natural"] == pytest.approx((np.exp(4) - 5 + np.exp(-1)) / 3)
    assert kl["k3_replayed"] == pytest.approx((np.exp(1) - 2 + np.exp(-1)) / 3)
    tails = sums.tails().set_index(["log_ratio", "size"])["tokens"]
    near = {kind: [int(tails[kind].iloc[(tails[kind].index > x).argmax()]) for x in (0.5, 1.5, 5)] for kind in
            ("natural", "replayed", "routing")}  # fmt: skip
    assert near == {"natural": [2, 1, 0], "replayed": [2, 0, 0], "routing": [1, 1, 0]}
    by_flips = (sums + count(measured_by_hand(3, 8, scale=3.0))[0]).variance_by_flips().set_index("flips")
    assert by_flips["tokens"].to_dict() == {0: 2, 1: 2, 2: 2}
    # one site changed before the tokens of log r 4 and 12, two before those of -1 and -3; of weights alone 1 and 3
    assert by_flips["natural"].to_dict() == {0: 0, 1: 32, 2: 2} and by_flips["replayed"].to_dict() == {0: 0, 1: 2, 2: 2}


def test_a_value_at_an_edge_is_in_the_bin_that_begins_there():
    edges = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    assert _bins(torch.tensor([0.5, 1.0, 9.9, 10.0, 100.0]), edges).tolist() == [1, 2, 1, 1]
    measured = measured_by_hand(3, 8)
    measured.margins[...] = 1.0
    sums, _ = count(measured)
    assert sums.by_margin()[["low", "choices"]].to_numpy().tolist() == [[1.0, 6]]
    tails = sums.tails().set_index(["log_ratio", "size"])["tokens"]["natural"]
    # log r = 4, -1, 0: at 1 there are two, next to it one, and at the least size none of the zeros
    assert tails.loc[1.0] == 2 and tails[tails.index > 1.0].iloc[0] == 1 and tails.iloc[0] == 2


def test_batches_add_up_whatever_their_length():
    once, _ = count(measured_by_hand(3, 8))
    short = measured_by_hand(3, 8)
    parts = short.parts
    cut = Decomposition(
        *(getattr(parts, name)[:, :2] for name in ("old", "new_weights", "new_routes", "new", "mask")),
        old_routes=RoutedExperts(parts.old_routes.ids[:, :2], parts.old_routes.sites, 4),
        new_routes_taken=RoutedExperts(parts.new_routes_taken.ids[:, :2], parts.old_routes.sites, 4),
    )
    whole = short.batch.text
    text = TokenBatch(whole.input_ids[:, :2], whole.attention_mask[:, :2], whole.completion_mask[:, :2])
    twice = once + count(Measured(TextBatch([1, 2], [1, 2], text), cut, short.margins[:, :2]))[0]
    assert twice.by_position()["tokens"].tolist() == [4, 1]
    assert twice.rates()["slot"]["changed"] == 6 and twice.shares.tokens.count == 5
    assert twice.experts()["old"].sum() == once.experts()["old"].sum() + 2 * 2 * 2


def test_median_is_log_linear_within_its_bin():
    edges = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    assert _median(torch.tensor([0, 2, 0, 0]), edges) == pytest.approx(10**0.5)
    assert _median(torch.tensor([0, 1, 3, 0]), edges) == pytest.approx(10 ** (1 + 1 / 3))
    assert np.isnan(_median(torch.zeros(4, dtype=torch.long), edges))
