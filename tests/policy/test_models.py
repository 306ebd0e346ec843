import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from moe_rl.policy.models import (
    ColdStartConfig,
    ModelConfig,
    ModelError,
    TinyConfig,
    build_tiny,
    char_tokenizer,
    cold_start,
    load_policy,
    seeded,
    weights_sha256,
)
from moe_rl.policy.tiny import demonstration_batch, router_parameters
from moe_rl.rollout import Problem, TaskConfig, VerifiableTask, make_task, sample

TASK = make_task(TaskConfig("copy", {"length": 2, "symbols": "abcd"}))
TOKENIZER = char_tokenizer(TASK.alphabet)
SMALL = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=4, moe_intermediate_size=8)
START = ColdStartConfig(steps=3, batch_size=8, warmup_steps=1)
CONFIG = ModelConfig(tiny=SMALL, cold_start=START)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# -- tokenizer and tiny model -----------------------------------------------------------------------------------


def test_char_tokenizer_is_one_token_per_character():
    text = "^abcd=dcba$"
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text
    assert TOKENIZER(["^a", "^"])["input_ids"] == [TOKENIZER("^a")["input_ids"], TOKENIZER("^")["input_ids"]]
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token, TOKENIZER.pad_token) == ("^", "$", "<pad>")
    assert len(TOKENIZER) == len(set(TASK.alphabet)) + 1 and TOKENIZER.padding_side == "left"
    assert char_tokenizer("dcba=").get_vocab() == TOKENIZER.get_vocab()  # order and repetition do not matter


def test_char_tokenizer_refuses_what_it_does_not_know():
    with pytest.raises(Exception, match=r"(?i)unk"):
        TOKENIZER("^z=")


def test_char_tokenizer_knows_white_space():
    tokenizer = char_tokenizer("a \n")
    assert tokenizer.decode(tokenizer("a \n a")["input_ids"]) == "a \n a"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_tiny_families(family):
    model = build_tiny(replace(SMALL, family=family, num_experts_per_tok=3), TOKENIZER)
    assert model.config.model_type == family and not model.training
    routers = router_parameters(model)
    assert [tuple(p.shape) for p in routers] == [(4, 16)] * 2 and all(p.std() > 0.03 for p in routers)
    scaled = build_tiny(replace(SMALL, family=family, num_experts_per_tok=3, router_init_scale=0.1), TOKENIZER)
    for (name, a), b in zip(model.named_parameters(), scaled.parameters(), strict=True):
        router = any(a is p for p in routers)
        assert torch.equal(a * 0.1 if router else a, b), name


def test_tiny_weights_come_from_its_seed_and_from_nothing_else():
    torch.manual_seed(1)
    first = build_tiny(SMALL, TOKENIZER)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # torch's own generator was not moved
    assert equal(first, build_tiny(SMALL, TOKENIZER))
    assert not equal(first, build_tiny(replace(SMALL, seed=1), TOKENIZER))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "model.tiny.num_experts_per_tok: between 1 and num_experts .4., got 5"),
        ({"hidden_size": 18}, "model.tiny.hidden_size: .* multiple of 2 x num_heads .2., got 18"),
    ],
)
def test_impossible_tiny_models_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        build_tiny(replace(SMALL, **change), TOKENIZER)


# -- cold start -------------------------------------------------------------------------------------------------


def test_demonstration_batch_labels_the_completion_and_its_end():
    ids, mask, labels = demonstration_batch(TOKENIZER, ["^ab=", "^a="], ["ab", ""])
    text = [TOKENIZER.convert_ids_to_tokens(row) for row in ids.tolist()]
    assert text == [[*"^ab=ab$"], [*"^a=$", "<pad>", "<pad>", "<pad>"]]
    assert mask.tolist() == [[1] * 7, [1] * 4 + [0] * 3]
    ignored = -100
    a, b, end = TOKENIZER("ab$")["input_ids"]
    assert labels.tolist() == [[ignored] * 4 + [a, b, end], [ignored] * 3 + [end] + [ignored] * 3]


def test_cold_start_learns_the_task():
    model = build_tiny(replace(SMALL, hidden_size=32), TOKENIZER)
    config = ColdStartConfig(steps=120, batch_size=32, learning_rate=1e-2, demonstration_noise=0.0)
    seen = []
    result = cold_start(model, TOKENIZER, TASK, config, lambda *args: seen.append(args))
    assert seen == [(i + 1, 120, loss) for i, loss in enumerate(result["loss"])]
    assert result["loss"][0] > 1.5 and result["loss"][-1] < 0.2
    assert result["pass@1"] > 0.8
    # Top-2 of 4 experts: the balance loss E * sum f_e p_e is 2 when balanced, 4 at worst.
    assert 1.9 < result["aux_loss"][-1] < 2.6


def learning(reward_at, monkeypatch):
    """A held-out reward that follows the steps taken, for rules about when to stop."""
    rewards = iter(reward_at)
    monkeypatch.setattr(f"{cold_start.__module__}.pass_at_1", lambda *_: next(rewards))


def test_a_cold_start_ends_at_its_reward_and_checks_change_nothing(monkeypatch):
    fixed, stopped = build_tiny(SMALL, TOKENIZER), build_tiny(SMALL, TOKENIZER)
    cold_start(fixed, TOKENIZER, TASK, replace(START, steps=4))
    checked = replace(START, steps=9, check_every=2, until_reward=0.4)
    sampled = cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(checked, steps=4, check_problems=8))
    assert [step for step, _ in sampled["checks"]] == [2, 4] and sampled["pass@1"] == sampled["checks"][-1][1]
    learning([0.39, 0.4], monkeypatch)
    result = cold_start(stopped, TOKENIZER, TASK, checked)
    assert result["steps"] == len(result["loss"]) == 4 and result["reached"]
    assert result["checks"] == [[2, 0.39], [4, 0.4]] and result["pass@1"] == 0.4
    assert equal(fixed, stopped) and not stopped.training


def test_the_last_step_of_a_cold_start_is_checked_too(monkeypatch):
    learning([0.1, 0.5], monkeypatch)
    result = cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(START, check_every=2, until_reward=0.4))
    assert result["checks"] == [[2, 0.1], [3, 0.5]] and result["reached"]


def test_cold_start_is_reproducible_bit_for_bit():
    models = [build_tiny(SMALL, TOKENIZER) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.rand(3)  # whatever torch's own generator does
        cold_start(model, TOKENIZER, TASK, replace(START, seed=seed))
    assert equal(models[0], models[1]) and not equal(models[0], models[2])


def test_a_frozen_router_stays_and_can_be_trained_later():
    model, before = build_tiny(SMALL, TOKENIZER), build_tiny(SMALL, TOKENIZER)
    cold_start(model, TOKENIZER, TASK, replace(START, freeze_router=True, aux_loss_coef=0.0))
    routers = {id(p) for p in router_parameters(model)}
    for (name, a), b in zip(model.named_parameters(), before.parameters(), strict=True):
        moved = not torch.equal(a, b)
        assert moved != (id(a) in routers), name
        assert a.requires_grad and a.grad is None


def test_a_cold_start_that_diverges_stops():
    with pytest.raises(ModelError, match=r"the loss is nan at step .*learning_rate"):
        model = build_tiny(SMALL, TOKENIZER)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        cold_start(model, TOKENIZER, TASK, START)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "model.cold_start.steps: expected at least 1, got 0"),
        ({"batch_size": 0}, "model.cold_start.batch_size: expected at least 1, got 0"),
        ({"until_reward": 1.5}, r"model.cold_start.until_reward: expected above 0 and at most 1, or null, got 1\.5"),
        ({"check_every": 0}, "model.cold_start.check_every: expected at least 1, got 0"),
        ({"check_problems": 0}, "model.cold_start.check_problems: expected at least 1, got 0"),
        ({"learning_rate": 0.0}, r"model.cold_start.learning_rate: expected a positive number, got 0\.0"),
        ({"demonstration_noise": 2.0}, r"model.cold_start.demonstration_noise: expected between 0 and 1, got 2\.0"),
    ],
)
def test_impossible_cold_starts_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        cold_start(build_tiny(SMALL, TOKENIZER), TOKENIZER, TASK, replace(START, **change))


class Mute(VerifiableTask):
    name, alphabet, max_new_tokens = "mute", "0123456789", 2

    def draw(self, rng):
        return Problem(f"^{rng.randrange(1000)}", "0")

    def reward(self, problem, completion):
        return 1.0


def test_a_task_without_demonstrations_says_what_to_do():
    with pytest.raises(ModelError, match=r"task mute has no demonstration.*model.cold_start to null"):
        load_policy(CONFIG, Mute())
    model, tokenizer = load_policy(replace(CONFIG, cold_start=None), Mute())
    assert equal(model, build_tiny(SMALL, tokenizer))


# -- the cache --------------------------------------------------------------------------------------------------


def load_counting(config, cache, task=TASK):
    steps = []
    model, tokenizer = load_policy(config, task, cache, lambda *args: steps.append(args))
    return model, tokenizer, len(steps)


def only_folder(cache):
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    return folder


def test_cold_starts_are_kept_and_found(tmp_path):
    first, tokenizer, steps = load_counting(CONFIG, tmp_path)
    again, _, none = load_counting(CONFIG, tmp_path)
    assert (steps, none) == (3, 0) and equal(first, again) and not again.training
    direct = build_tiny(SMALL, TOKENIZER)
    result = cold_start(direct, TOKENIZER, TASK, START)
    assert equal(first, direct)
    assert tokenizer("^ab=")["input_ids"] == TOKENIZER("^ab=")["input_ids"]
    assert json.loads((only_folder(tmp_path) / "cold_start.json").read_text())["loss"] == result["loss"]
    by_path, _ = load_policy(ModelConfig(path=str(only_folder(tmp_path))), TASK)  # it is an ordinary checkpoint
    assert equal(by_path, first)
    uncached, _ = load_policy(CONFIG, TASK)
    assert equal(uncached, first)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, tiny=replace(SMALL, seed=1)),
        replace(CONFIG, cold_start=replace(START, demonstration_noise=0.1)),
    ],
)
def test_another_recipe_is_another_model(tmp_path, config):
    load_policy(CONFIG, TASK, tmp_path)
    assert load_counting(config, tmp_path)[2] == 3


def test_what_names_no_seed_takes_the_runs():
    config = seeded(CONFIG, 4)
    assert (config.tiny.seed, config.cold_start.seed) == (4, 4)
    fixed = replace(CONFIG, tiny=replace(SMALL, seed=1), cold_start=replace(START, seed=2))
    assert seeded(fixed, 4) == fixed
    assert seeded(replace(CONFIG, cold_start=None), 4).cold_start is None
    assert equal(load_policy(CONFIG, TASK)[0], load_policy(seeded(CONFIG, 0), TASK)[0])
    assert not equal(load_policy(CONFIG, TASK)[0], load_policy(config, TASK)[0])


def test_a_cold_start_that_did_not_learn_is_an_error_and_not_tried_again(tmp_path, monkeypatch):
    config = replace(CONFIG, cold_start=replace(START, until_reward=0.4, seed=5))
    learning([0.19], monkeypatch)
    said, steps = r"seed 5 ended at .* 0\.190 after 3 steps, .* asks for 0\.4\. Give all runs", []
    for _ in range(2):  # the second finds it in the cache
        with pytest.raises(ModelError, match=said):
            load_policy(config, TASK, tmp_path, lambda *args: steps.append(args))
    assert len(steps) == 3


def test_other_kernels_are_another_cold_start(tmp_path, monkeypatch):
    facts = []
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    load_policy(CONFIG, TASK, tmp_path, report=facts.append)
    assert load_counting(CONFIG, tmp_path)[2] == 0
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert load_counting(CONFIG, tmp_path)[2] == 3
    assert facts[0]["cold_start"]["kernels"] == "AVX2" and len(list(tmp_path.glob("*/cold_start.json"))) == 2


def test_what_a_run_starts_from_is_reported(tmp_path):
    facts = []
    model, _ = load_policy(replace(CONFIG, cold_start=replace(START, seed=7)), TASK, tmp_path, report=facts.append)
    (told,) = facts
    start = told["cold_start"]
    assert (start["seed"], start["steps"], start["until_reward"]) == (7, 3, None) and 0 <= start["reward"] <= 1
    assert told["weights_sha256"] == weights_sha256(model)
    load_policy(replace(CONFIG, cold_start=None), TASK, report=facts.append)
    assert facts[1]["cold_start"] is None and facts[1]["weights_sha256"] == weights_sha256(build_tiny(SMALL, TOKENIZER))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-6
    assert told["weights_sha256"] != weights_sha256(model)


def test_a_cold_start_does_not_depend_on_the_number_of_threads(tmp_path):
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        load_policy(CONFIG, TASK, tmp_path, lambda *_: seen.append(torch.get_num_threads()))
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_another_task_is_another_model(tmp_path):
    load_policy(CONFIG, TASK, tmp_path)
    reverse = make_task(TaskConfig("reverse", {"length": 2, "symbols": "abcd"}))
    longer = make_task(TaskConfig("copy", {"length": 3, "symbols": "abcd"}))
    assert [load_counting(CONFIG, tmp_path, task)[2] for task in (reverse, longer, TASK)] == [3, 3, 0]


def test_how_it_is_run_does_not_change_what_it_learned(tmp_path):
    plain, _, _ = load_counting(CONFIG, tmp_path)
    config = replace(CONFIG, dtype="bfloat16", experts_implementation="eager", gradient_checkpointing=True)
    model, _, steps = load_counting(config, tmp_path)
    assert steps == 0 and equal(plain.to(torch.bfloat16), model)
    assert model.config._experts_implementation == "eager"
    assert model.model.gradient_checkpointing and not build_tiny(SMALL, TOKENIZER).model.gradient_checkpointing
    rollout = sample(model.train(), TOKENIZER, [Problem("^ab=", "ab")], group_size=2, max_new_tokens=3)
    assert model.training and not rollout.logps.requires_grad


def test_an_interrupted_cold_start_leaves_nothing(tmp_path):
    def interrupt(step, steps, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_policy(CONFIG, TASK, tmp_path, interrupt)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert load_counting(CONFIG, tmp_path)[2] == 3


def test_those_who_want_the_same_model_make_it_once(tmp_path, monkeypatch):
    # transformers replaces this method while a model loads, and two threads can leave it replaced: ties would be lost.
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)
    steps = []
    threads = [threading.Thread(target=lambda: steps.append(load_counting(CONFIG, tmp_path)[2])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps) == [0, 3]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=f"cannot keep cold-started models in {tmp_path}/file: .*another folder"):
        load_policy(CONFIG, TASK, tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelError, match=f"cannot write the cold-started model to {tmp_path}.*No space left"):
        load_policy(CONFIG, TASK, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "cold_start.json", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [truncate, lambda path: path.unlink(), flip])
def test_a_damaged_cache_says_where_and_what_to_do(tmp_path, file, damage):
    load_policy(CONFIG, TASK, tmp_path)
    folder = only_folder(tmp_path)
    damage(folder / file)
    with pytest.raises(ModelError, match=rf"{folder}.*Delete the folder: it will be made anew"):
        load_policy(CONFIG, TASK, tmp_path)
    shutil.rmtree(folder)
    assert load_counting(CONFIG, tmp_path)[2] == 3


def test_a_folder_of_another_recipe_is_not_used(tmp_path):
    load_policy(CONFIG, TASK, tmp_path)
    file = only_folder(tmp_path) / "cold_start.json"
    stored = json.loads(file.read_text())
    stored["recipe"]["cold_start"]["steps"] = 4
    file.write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="holds a cold-started model of another recipe"):
        load_policy(CONFIG, TASK, tmp_path)


# -- models by path ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(SMALL, TOKENIZER).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def load(path, **options):
    return load_policy(ModelConfig(path=str(path), **options), TASK)


def test_a_local_folder(saved, monkeypatch):
    model, tokenizer = load(saved)
    assert equal(model, build_tiny(SMALL, TOKENIZER)) and tokenizer.padding_side == "left"
    monkeypatch.chdir(saved.parent)
    assert equal(load("tiny")[0], model)
    monkeypatch.setenv("HOME", str(saved.parent))
    assert equal(load("~/tiny")[0], model)
    assert load(saved, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_a_tokenizer_without_padding_gets_some(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(copied)[1].pad_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("path", ["no/such/folder", "./none", "none", "/none", "~/none"])
def test_a_folder_that_is_not_there(path):
    with pytest.raises(ModelError, match=r"model.path: there is no folder /"):
        load(path)


def test_a_hub_model_that_cannot_be_reached_is_named(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model.path: cannot load nobody/nothing"):
        load("nobody/nothing")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"holds no model \(no config.json\)"):
        load(tmp_path)


def test_damaged_weights(copied):
    truncate(copied / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model.path: cannot load {copied}: Safetensor"):
        load(copied)


def test_weights_that_do_not_fit_the_config(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"does not fit its config: missing keys \['model.layers.2"):
        load(copied)
    (copied / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 12}))
    with pytest.raises(ModelError, match=r"model.path: .*(mismatch|shape|size)"):
        load(copied)


def test_a_missing_tokenizer(copied):
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load(copied)


def test_a_dense_model(tmp_path):
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no Mixture-of-Experts to study: .*Llama"):
        load(tmp_path)


def test_not_a_causal_language_model(tmp_path):
    config = T5Config(vocab_size=len(TOKENIZER), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model.path: cannot load .*T5Config"):
        load(tmp_path)


def test_an_unknown_dtype():
    with pytest.raises(ModelError, match=r"model.dtype: expected one of float32, bfloat16, float16, got 'fp8'"):
        load_policy(replace(CONFIG, dtype="fp8"), TASK)
