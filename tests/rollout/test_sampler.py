import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import Problem, TaskConfig, completions, engine, make_task, sample, score
from moe_rl.rollout.completions import end_tokens
from moe_rl.rollout.engine import draw_tokens
from moe_rl.routing import record_routes

TASK = make_task(TaskConfig("copy", {"length": 3, "symbols": "abcdef"}))
TOKENIZER = char_tokenizer(TASK.alphabet)
PROMPTS = [Problem(text, "") for text in ("^abc=", "^f", "^abcdeffedcba=", "^=a", "^cc=")]
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "minimax_m2")


def tiny(family="qwen3_moe", **options):
    """Random weights, spread enough that tokens are far from uniform; about 1 token in 10 ends a sequence."""
    options = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_experts": 8, "initializer_range": 0.3} | options
    return build_tiny(TinyConfig(family=family, moe_intermediate_size=8, **options), TOKENIZER)


MODEL = tiny()


def draw(model=MODEL, problems=PROMPTS, group_size=4, max_new_tokens=12, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return sample(
        model,
        TOKENIZER,
        problems,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        generator=generator,
        **options,
    )


@torch.no_grad()
def one_by_one(model, rollout, temperature):
    """Teacher-forced log-probabilities, each row alone and without its padding."""
    logps = torch.zeros_like(rollout.logps)
    for b in range(len(rollout)):
        real = rollout.attention_mask[b]
        ids = rollout.input_ids[b][real][None]
        logp = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        logps[b, real.nonzero()[1:, 0]] = logp.gather(1, ids[0, 1:, None])[:, 0]
    return logps * rollout.completion_mask


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_are_the_teacher_forced_ones(family, temperature):
    model = tiny(family)
    rollout = draw(model, temperature=temperature)
    expected = one_by_one(model, rollout, temperature)
    assert (rollout.logps - expected).abs().max() < 1e-4
    # so a policy at the sampling weights has ratio 1 on every token
    assert ((expected - rollout.logps).exp() - 1).abs().max() < 1e-4
    assert (rollout.logps[rollout.completion_mask] < 0).all()


def test_greedy_is_what_generate_gives():
    rollout = draw(group_size=1, temperature=0.0)
    lengths = set()
    for b, problem in enumerate(PROMPTS):
        ids = TOKENIZER(problem.prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        wanted = MODEL.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert rollout.input_ids[b][rollout.completion_mask[b]].tolist() == wanted.tolist()
        lengths.add(len(wanted))
    assert len(lengths) > 1  # some ended early


def test_rows_are_aligned_and_padding_is_empty():
    rollout = draw(max_new_tokens=9)
    width = max(len(p.prompt) for p in PROMPTS)
    for b in range(len(rollout)):
        problem = PROMPTS[b // 4]
        assert rollout.problems[b] == problem
        prompt, rest = rollout.input_ids[b, :width], rollout.input_ids[b, width:]
        n, p = int(rollout.lengths[b]), len(problem.prompt)
        assert prompt.tolist() == [0] * (width - p) + TOKENIZER(problem.prompt)["input_ids"]
        assert rollout.attention_mask[b].tolist() == [False] * (width - p) + [True] * (p + n) + [False] * (
            len(rest) - n
        )
        assert rollout.completion_mask[b].nonzero()[:, 0].tolist() == list(range(width, width + n))
        assert rest[n:].eq(0).all() and rollout.logps[b][~rollout.completion_mask[b]].eq(0).all()
        # the end token is the completion's last, or there is none and the limit cut it
        ends = (rest[:n] == TOKENIZER.eos_token_id).nonzero()[:, 0].tolist()
        assert ends == ([n - 1] if rollout.finished[b] else [])
        assert rollout.finished[b] or n == 9
        assert rollout.completions[b] == TOKENIZER.decode(rest[: n - len(ends)])
    assert 0 < rollout.finished.sum() < len(rollout)
    assert rollout.rewards.isnan().all() and rollout.input_ids.shape[1] == width + int(rollout.lengths.max())


def test_special_tokens_inside_a_completion_stay_visible():
    tokens = torch.tensor([[4, 0, 5, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id]])
    text = completions.decode_text(TOKENIZER, tokens, torch.tensor([4]))
    assert text == [TOKENIZER.decode(4) + "<pad>" + TOKENIZER.decode(5) + "^"]


@pytest.mark.parametrize(
    "change", ["never compact", "always compact", "chunks of 3", "chunks of 7", "no selection", "other groups after"]
)
def test_a_row_does_not_depend_on_what_is_decoded_with_it(change, monkeypatch):
    whole = draw(record=True)
    problems, options = PROMPTS, {}
    if change == "never compact":
        monkeypatch.setattr(engine, "COMPACT_SHARE", 2.0)
    elif change == "always compact":
        monkeypatch.setattr(engine, "COMPACT_SHARE", 1e-9)
    elif change == "no selection":
        monkeypatch.setattr(engine, "_selectable", lambda cache: False)
    elif change == "other groups after":
        problems = [*PROMPTS, Problem("^aabbccddeeffaabb=", "")]
    else:
        options["max_batch"] = int(change.split()[-1])
    other = draw(problems=problems, record=True, **options)
    rows, width = len(whole), whole.input_ids.shape[1]
    shift = other.input_ids.shape[1] - width if change == "other groups after" else 0
    assert other.completions[:rows] == whole.completions
    assert (other.logps[:rows, shift:][whole.completion_mask] - whole.logps[whole.completion_mask]).abs().max() < 1e-4
    ids = whole.routes.ids
    assert torch.equal(other.routes.ids[:rows, shift : shift + width].sort(-1).values, ids.sort(-1).values)


@pytest.mark.parametrize("change", ["as ever", "no selection", "chunks of 3"])
def test_a_row_is_decoded_up_to_its_room(change, monkeypatch):
    """Tokens in it are the same, and the model is not asked for positions beyond, where rows can leave the batch."""
    if change == "no selection":
        monkeypatch.setattr(engine, "_selectable", lambda cache: False)
    sampler = engine.ModelEngine(MODEL, TOKENIZER, 3 if change == "chunks of 3" else None)
    prompts, mask = completions.encode_prompts(TOKENIZER, PROMPTS)
    uniform = torch.rand(len(prompts), 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = prompts, mask, torch.arange(len(prompts)), uniform, torch.tensor([-5]), 1.0, False  # nothing ends a row
    whole, logps, _ = sampler.decode(*parts)
    room = torch.tensor([9, 5, 1, 2, 3])
    fed = []
    hook = MODEL.register_forward_pre_hook(lambda _, given, named: fed.append(named), with_kwargs=True)
    tokens, others, _ = sampler.decode(*parts, room=room)
    hook.remove()
    inside = torch.arange(12) < room[:, None]
    assert torch.equal(tokens, whole.masked_fill(~inside, completions.UNWRITTEN))
    torch.testing.assert_close(others, logps * inside, atol=1e-4, rtol=0)
    steps = [named["input_ids"].numel() for named in fed if named["input_ids"].shape[1] == 1]
    assert len(steps) == {"chunks of 3": 8 + 2}.get(change, 8), "the last token that a row draws is not fed"
    assert change == "no selection" or sum(steps) == int((room - 1).sum())


def test_same_generator_same_rollout():
    first, again, other = draw(seed=3), draw(seed=3), draw(seed=4)
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.logps, again.logps)
    assert first.completions != other.completions


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_routes_are_the_teacher_forced_ones(family):
    model = tiny(family, num_experts_per_tok=3)
    rollout = draw(model, record=True, max_batch=13)
    with record_routes(model) as recording, torch.no_grad():
        mask = rollout.attention_mask.long()
        model(input_ids=rollout.input_ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    expected, got = recording.routes, rollout.routes
    assert got.sites == expected.sites and got.num_experts == 8 and torch.equal(got.tokens, rollout.input_ids.int())
    # routed: every real token but each row's last one
    routed = rollout.attention_mask.clone()
    last = rollout.completion_mask.int().cumsum(1).argmax(1)
    routed[torch.arange(len(rollout)), last] = False
    assert torch.equal(~got.live, routed[:, :, None].expand_as(got.live))
    assert torch.equal(got.ids.sort(-1).values[routed], expected.ids.sort(-1).values[routed])


def test_sampling_leaves_the_model_as_it_was():
    model = tiny().train()
    model.model.layers[0].eval()
    draw(model, record=True)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="boom"):
        model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        draw(model)
    assert model.training and not model.model.layers[0].training


def test_a_rollout_can_be_trained_on():
    model = tiny()
    rollout = draw(model)
    assert not rollout.logps.requires_grad and not rollout.logps.is_inference()
    logits = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask.long()).logits
    (logits.log_softmax(-1).mean(-1) * rollout.logps * rollout.completion_mask).sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_sliding_window():
    model = tiny("mixtral")
    model.config.sliding_window = 4
    torch.manual_seed(0)
    windowed = type(model)(model.config).eval()
    windowed.load_state_dict(model.state_dict())
    rollout = draw(windowed)
    assert (rollout.logps - one_by_one(windowed, rollout, 1.0)).abs().max() < 1e-4
    assert rollout.completions != draw(model=tiny("mixtral")).completions  # the window matters here


def test_recurrent_state_is_neither_repeated_nor_selected():
    # Half of the layers are linear attention: their cache keeps states that batch_select_indices does not touch.
    config = Qwen3NextConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        initializer_range=0.3,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).eval()
    rollout = draw(model, max_new_tokens=6)
    assert 0 < rollout.finished.sum() < len(rollout)
    assert (rollout.logps - one_by_one(model, rollout, 1.0)).abs().max() < 1e-4


class Bigram(nn.Module):
    """No cache, no position_ids, no generation config: logits depend on the last token only."""

    def __init__(self, vocabulary):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        return SimpleNamespace(logits=self.table[input_ids])


def test_a_model_without_a_cache_is_fed_everything():
    model = Bigram(len(TOKENIZER))
    rollout = draw(model)
    ids = rollout.input_ids
    expected = model.table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]] * rollout.completion_mask[:, 1:]
    assert torch.allclose(rollout.logps[:, 1:], expected, atol=1e-6)


class Wrapper(nn.Module):
    """Hides the model's signature and attributes, as PEFT and DDP do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_wrapped_models_get_their_positions_and_end_tokens():
    model = tiny()
    model.generation_config.eos_token_id = TOKENIZER.convert_tokens_to_ids(["a", "$"])
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    wrapped, bare = draw(Wrapper(model)), draw(model)
    assert torch.equal(wrapped.input_ids, bare.input_ids) and torch.equal(wrapped.logps, bare.logps)
    # prompts of 5, 2, 14, 3 and 4 tokens, left-padded to 14: the last one stands at its own length - 1
    prefill, step = seen[0]["position_ids"], seen[1]["position_ids"]
    assert prefill[:, -1].tolist() == [4, 1, 13, 2, 3]
    assert prefill[1].tolist() == [0] * 13 + [1]
    assert sorted(set(step[:, 0].tolist())) == [2, 3, 4, 5, 14]
    model.generation_config.eos_token_id = -1  # as some configurations say that there is none
    assert end_tokens(Wrapper(model), TOKENIZER).tolist() == [TOKENIZER.eos_token_id]


def test_sampled_frequencies_are_the_model_s():
    model = Bigram(len(TOKENIZER))
    n = 20_000
    rollout = draw(model, [Problem("^a", "")], group_size=n, max_new_tokens=1, temperature=0.5)
    expected = (model.table[TOKENIZER.convert_tokens_to_ids("a")] / 0.5).softmax(-1)
    counts = rollout.input_ids[:, -1].bincount(minlength=len(TOKENIZER))
    assert ((counts - n * expected).abs() < 4.5 * (n * expected * (1 - expected)).sqrt() + 1).all()


def test_draw_tokens_inverts_the_distribution():
    # probabilities .2 .3 .5: cumulative .2 .5 1
    logits = torch.tensor([0.2, 0.3, 0.5]).log().expand(6, 3)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.49, 0.51, 0.999])
    token, logp = draw_tokens(logits, uniform, 1.0)
    assert token.tolist() == [0, 0, 1, 1, 2, 2]
    assert logp.exp().tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.5, 0.5])
    # temperature 1/2 squares them: .04 .09 .25 over .38 = .105 .237 .658; cumulative .105 .342 1
    token, logp = draw_tokens(logits, torch.tensor([0.1, 0.11, 0.34, 0.35, 0.9, 0.0]), 0.5)
    assert token.tolist() == [0, 1, 1, 2, 2, 0]
    assert logp[0].exp().item() == pytest.approx(0.04 / 0.38)
    token, logp = draw_tokens(logits, uniform, 0.0)
    assert token.tolist() == [2] * 6 and logp[0].item() == pytest.approx(math.log(0.5))


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, 5)
    almost_one = 1 - 2**-53
    token, logp = draw_tokens(logits, torch.tensor([0.0, 0.5, almost_one], dtype=torch.float64), 1.0)
    assert token.tolist() == [1, 3, 3] and logp.exp().tolist() == pytest.approx([0.5] * 3)


def test_every_end_token_of_the_generation_config_ends():
    model = tiny()
    ends = [TOKENIZER.eos_token_id, *TOKENIZER.convert_tokens_to_ids(["a", "b"])]
    model.generation_config.eos_token_id = ends
    rollout = draw(model)
    for row, mask, finished in zip(rollout.input_ids, rollout.completion_mask, rollout.finished, strict=True):
        where = torch.isin(row[mask], torch.tensor(ends)).nonzero()[:, 0].tolist()
        assert where == ([int(mask.sum()) - 1] if finished else [])
    assert {int(row[mask][-1]) for row, mask in zip(rollout.input_ids, rollout.completion_mask, strict=True)} >= set(
        ends
    )


def test_score_asks_the_verifier_about_every_row():
    problems = [TASK.problem(random.Random(seed)) for seed in range(3)]
    rollout = draw(problems=problems)

    asked = []

    class Judge:
        name, alphabet, max_new_tokens = "judge", "", 1

        def problem(self, rng, held_out=False):
            raise AssertionError("scoring draws nothing")

        def reward(self, problem, completion):
            asked.append((problem, completion))
            return len(asked) / 2

    rewards = score(Judge(), rollout).rewards
    assert asked == [(problems[b // 4], rollout.completions[b]) for b in range(12)]
    assert rewards.tolist() == [(b + 1) / 2 for b in range(12)]
    assert rollout.rewards.isnan().all()


def test_rows_takes_everything_along():
    rollout = score(TASK, draw(record=True))
    index = torch.tensor([7, 0, 7])
    part = rollout.rows(index)
    assert len(part) == 3 and part.completions == [rollout.completions[i] for i in (7, 0, 7)]
    assert part.problems == [rollout.problems[i] for i in (7, 0, 7)]
    for name in ("input_ids", "attention_mask", "completion_mask", "logps", "rewards", "finished"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[index])
    assert torch.equal(part.routes.ids, rollout.routes.ids[index])
    assert part.to("cpu").completions == part.completions
    mask = torch.zeros(len(rollout), dtype=torch.bool)
    mask[[2, 5]] = True
    chosen = rollout.rows(mask)
    assert chosen.completions == [rollout.completions[i] for i in (2, 5)] and len(chosen.problems) == 2
    assert torch.equal(chosen.input_ids, rollout.input_ids[mask]) and chosen.routes.shape[0] == 2
    with pytest.raises(IndexError, match=r"a mask of rows must be \[B\]"):
        rollout.rows(mask[:3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problems": []}, "problems: nothing to sample"),
        ({"problems": ["^ab="]}, r"problems: expected Problem\(prompt, answer\) for each, got '\^ab='"),
        ({"problems": "^ab="}, r"problems: expected Problem\(prompt, answer\) for each"),
        ({"problems": [PROMPTS[0], Problem("", "")]}, "problem 1: the prompt '' has no tokens"),
        ({"group_size": 0}, "group_size: expected a whole number of at least 1, got 0"),
        ({"group_size": 2.0}, "group_size: expected a whole number of at least 1, got 2.0"),
        ({"temperature": "1"}, "temperature: expected 0 .* or a positive number, got '1'"),
        ({"max_new_tokens": 0}, "max_new_tokens: .* of at least 1, got 0"),
        ({"max_new_tokens": 500}, r"a text of 14 tokens .* and 500 new .* than the 512 positions .*'\^abcdeffedcba='"),
        ({"max_batch": 0}, "max_batch: .* of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected 0 .greedy. or a positive number, got -1.0"),
        ({"temperature": math.nan}, "temperature: expected 0 .greedy. or a positive number, got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        draw(**options)
