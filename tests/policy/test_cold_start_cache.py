"""Cold starts in a cache: what is found again, what is another model, and what damage is told."""

import json
import shutil
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from policy_helpers import CONFIG, SMALL, START, TASK, TOKENIZER, equal, learning, truncate
from transformers import PreTrainedModel

from moe_rl.policy.models import ModelConfig, load_policy, seeded, weights_sha256
from moe_rl.policy.tiny import ModelError, build_tiny, cold_start
from moe_rl.rollout import Problem, TaskConfig, make_task, sample


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
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    lock.mkdir()  # a folder of others, or read-only: what is there needs no lock
    assert equal(load_counting(CONFIG, tmp_path)[0], first)
    lock.rmdir()
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


def test_another_verifier_limit_or_line_is_another_model(tmp_path):
    def task(answer=0, **options):
        path = tmp_path / "sums.jsonl"
        answers = [str(i + 1) for i in range(200)]
        answers[150] = str(answer)
        path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": a}) + "\n" for i, a in enumerate(answers)))
        return make_task(TaskConfig("jsonl", {"path": str(path), **options}))

    made = [load_counting(CONFIG, tmp_path / "cache", task(answer))[2] for answer in (0, 0, 1)]
    assert made == [3, 0, 3]
    for options in ({"max_new_tokens": 2}, {"verifier": "exact_match"}):
        assert load_counting(CONFIG, tmp_path / "cache", task(**options))[2] == 3


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
    reports = []
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    load_policy(CONFIG, TASK, tmp_path, report=reports.append)
    assert load_counting(CONFIG, tmp_path)[2] == 0
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert load_counting(CONFIG, tmp_path)[2] == 3
    assert reports[0]["cold_start"]["kernels"] == "AVX2" and len(list(tmp_path.glob("*/cold_start.json"))) == 2


def test_what_a_run_starts_from_is_reported(tmp_path):
    reports = []
    model, _ = load_policy(replace(CONFIG, cold_start=replace(START, seed=7)), TASK, tmp_path, report=reports.append)
    (told,) = reports
    start = told["cold_start"]
    assert (start["seed"], start["steps"], start["until_reward"]) == (7, 3, None) and 0 <= start["reward"] <= 1
    assert told["weights_sha256"] == weights_sha256(model)
    load_policy(replace(CONFIG, cold_start=None), TASK, report=reports.append)
    assert reports[1]["cold_start"] is None and reports[1]["weights_sha256"] == weights_sha256(
        build_tiny(SMALL, TOKENIZER)
    )
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


def test_where_there_are_no_locks_the_first_that_is_made_is_taken(tmp_path, monkeypatch):
    first, _, _ = load_counting(CONFIG, tmp_path / "other")
    made = only_folder(tmp_path / "other")

    def meanwhile(step, steps, loss):
        shutil.copytree(made, tmp_path / "own" / made.name, dirs_exist_ok=True)

    model, _ = load_policy(CONFIG, TASK, tmp_path / "own", meanwhile)
    assert equal(model, first) and only_folder(tmp_path / "own").name == made.name


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=f"cannot keep cold-started models in {tmp_path}/file: .*another folder"):
        load_policy(CONFIG, TASK, tmp_path / "file")
    with monkeypatch.context() as read_only:
        read_only.setattr("pathlib.Path.touch", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(ModelError, match=r"cannot keep cold-started models in .*Permission denied"):
            load_policy(CONFIG, TASK, tmp_path / "there")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelError, match=f"cannot write the cold-started model to {tmp_path}.*No space left"):
        load_policy(CONFIG, TASK, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


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
