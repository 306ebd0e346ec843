"""The sampling engine's routes in TRL, replayed (R3) or measured: of `rollout_func` or of vLLM's classes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutedExperts, RoutingError, record_routes, replay_routes

pytest.importorskip("trl", reason="needs `pip install '.[trl]'`")

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe, routes_of
from tiny_trl import TINY, TOKENIZER, equal, logged, make, spying, trained
from trl import GRPOTrainer

from moe_rl.integrations.trl import routing_replay
from moe_rl.integrations.trl_sampled import SampledRoutes
from moe_rl.policy import build_tiny


class Engine:
    """Answers of fixed text, and the routes that a model with other routers chose for them, as vLLM lays them out:
    one row for each token but the last, integers `[P+G-1, layers, K]`."""

    def __init__(self):
        self.model = build_tiny(TINY, TOKENIZER)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "gate.weight" in name:
                    weight.copy_(weight.roll(1, dims=0))
        self.routes = {}

    def answer(self, prompts, trainer, field="routed_experts"):
        generator = torch.Generator().manual_seed(len(self.routes))
        asked = [TOKENIZER(prompt)["input_ids"] for prompt in prompts]
        said = [torch.randint(2, 12, (2 + i % 4,), generator=generator).tolist() for i in range(len(prompts))]
        arrays = []
        for a, b in zip(asked, said, strict=True):
            with torch.no_grad(), record_routes(self.model) as recording:
                self.model(torch.tensor([a + b]))
            arrays.append(recording.routes.ids[0, :-1].numpy().astype(np.uint8))
            self.routes[tuple(a + b)] = recording.routes.ids[0, :-1]
        return {"prompt_ids": asked, "completion_ids": said, "logprobs": [[-1.0] * len(b) for b in said], field: arrays}


class Forced(Engine):
    """The trained model itself, begun alike, but for other experts of the same scores: the next two in the circle. Its
    first answer's first log-probability is not known."""

    def __init__(self):
        super().__init__()
        self.model, self.gaps, self.changed = build_tiny(TINY, TOKENIZER), [], []

    def answer(self, prompts, trainer):
        found = super().answer(prompts, trainer)
        logprobs, arrays = [], []
        for a, b in zip(found["prompt_ids"], found["completion_ids"], strict=True):
            tokens = torch.tensor([a + b])
            with torch.no_grad():
                with record_routes(self.model) as recording:
                    live = self.model(tokens).logits
                ids = (recording.routes.ids + 2) % TINY.num_experts
                forced = RoutedExperts(ids, recording.routes.sites, TINY.num_experts)
                with replay_routes(self.model, forced):
                    other = self.model(tokens).logits
            said = [
                x.log_softmax(-1)[0, len(a) - 1 : -1].gather(1, tokens[0, len(a) :, None])[:, 0] for x in (live, other)
            ]
            logprobs.append(said[1].tolist())
            arrays.append(ids[0, :-1].numpy().astype(np.uint8))
            self.gaps += (said[0] - said[1]).tolist()
            same = (recording.routes.ids[..., None] == ids[..., None, :]).any(-1)[0, len(a) : -1]
            self.changed += (~same).flatten().tolist()
        logprobs[0][0] = None
        return {**found, "logprobs": logprobs, "routed_experts": arrays}


@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
def test_the_engine_is_measured_and_what_replay_leaves_of_the_gap(replay, tmp_path):
    """Of an engine that differs by its routes alone, replaying them leaves nothing."""
    engine = Forced()
    options = {"replay": replay, "rollout_func": engine.answer, "probe_sequences": 100, "run_folder": tmp_path / "runs"}
    options |= {} if replay == "R3" else {"measure_engine": True}
    trainer = trained(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, max_steps=1)
    gap = torch.tensor(engine.gaps[1:], dtype=torch.float64)  # of the first none is known
    by_hand = {"k3": float((gap.exp() - 1 - gap).mean()), "gap_mean": float(gap.abs().mean())}
    assert by_hand["gap_mean"] > 0.01
    folder = tmp_path / "runs" / f"dapo{'' if replay == 'none' else f'_{replay.lower()}'}" / "seed1"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = {row["pair"]: row for row in rows if row["kind"] == "engine"}
    for name, value in by_hand.items():
        assert logged(trainer, f"routing/engine_{name}")[1] == pytest.approx(value, rel=1e-3)
        assert rows["engines"][name] == pytest.approx(value, rel=1e-3)
        assert abs(logged(trainer, f"routing/engine_{name}_replayed")[1]) < 1e-3 * value
        assert abs(rows["engines_replayed"][name]) < 1e-3 * value
    change = sum(engine.changed) / len(engine.changed)
    assert logged(trainer, "routing/engine_slot_change")[1] == pytest.approx(change, abs=1e-12)
    assert rows["engines"]["slots"] == len(engine.changed)
    assert rows["engines"]["measured"] == rows["engines_replayed"]["measured"] == len(gap) != rows["engines"]["tokens"]


def test_measuring_the_engine_changes_no_bit(tmp_path):
    options = {"replay": "none", "measure_engine": True}
    ours = trained(routing_replay(GRPOTrainer), tmp_path, options={**options, "rollout_func": Forced().answer})
    assert equal(ours, trained(GRPOTrainer, tmp_path, options={"rollout_func": Forced().answer}))
    assert set(logged(ours, "routing/replayed_fraction").values()) == {0.0}


def saying(engine, per_token):
    """The engine's answers with this as the log-probability of each token."""

    def answer(prompts, trainer):
        found = engine.answer(prompts, trainer)
        return {**found, "logprobs": [[per_token] * len(said) for said in found["completion_ids"]]}

    return answer


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_an_engine_may_take_its_log_probabilities_from_the_trainer(replay, tmp_path):
    """That pass is made while responses are sampled, and is not the one that the ratio is taken to."""
    engine = Engine()

    def answer(prompts, trainer):
        found = engine.answer(prompts, trainer)
        logprobs = []
        for a, b in zip(found["prompt_ids"], found["completion_ids"], strict=True):
            tokens = torch.tensor([a + b])
            with torch.no_grad():
                said = trainer._get_per_token_logps_and_entropies(
                    trainer.model, tokens, torch.ones_like(tokens), len(b)
                )
            logprobs.append(said[0][0].tolist())
        return {**found, "logprobs": logprobs}

    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options={"replay": replay, "rollout_func": answer})
    assert (trainer._old.choice is trainer._old.routes) == (replay == "R2"), "kept once where they are the same"
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}


@pytest.mark.parametrize("per_token", [None, [-1.0]])
def test_r3_goes_on_without_log_probabilities_that_cannot_be_compared(per_token, tmp_path):
    options = {"replay": "R3", "rollout_func": saying(Engine(), per_token)}
    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options=options)
    assert min(logged(trainer, "routing/engine_slot_change").values()) > 0.3
    assert not logged(trainer, "routing/engine_k3")


@pytest.mark.parametrize("kind", [lambda x: np.array(x, dtype=np.float32), torch.tensor])
def test_log_probabilities_are_whatever_numbers_trl_takes(kind, tmp_path):
    engine = Engine()

    def answer(prompts, trainer):
        found = engine.answer(prompts, trainer)
        return {**found, "logprobs": [kind(one) for one in found["logprobs"]]}

    options = {"replay": "none", "measure_engine": True, "rollout_func": answer}
    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options=options, max_steps=1)
    assert logged(trainer, "routing/engine_gap_mean")[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "here the trained model itself samples"),
        ({"probe_sequences": 0}, "probe_sequences=0 probes none"),
        ({"given": {"logprobs": None}}, "the engine that samples gave none"),
        ({"given": {"logprobs": [[-1.0]] * 16}}, r"sequence 0 of 16 has 1 log-probabilities .* for 2 tokens"),
        ({"per_token": None}, "gave no token a log-probability"),
        ({"per_token": float("nan")}, "gave no token a log-probability"),
        ({"per_token": [-1.0]}, "a list for a token as 'logprobs', expected a number"),
        ({"given": {"routed_experts": []}}, r"for each of 16 sequences; got 0"),
        ({"given": {"routed_experts": None}}, r"for each of 16 sequences; got 0"),
    ],
)
def test_an_engine_that_cannot_be_measured_is_an_error(options, message, tmp_path):
    engine, given = Engine(), options.pop("given", None)
    if "per_token" in options:
        options["rollout_func"] = saying(engine, options.pop("per_token"))
    if given is not None:
        options["rollout_func"] = lambda prompts, trainer: {**engine.answer(prompts, trainer), **given}
    with pytest.raises(RoutingError, match=message):
        trained(routing_replay(GRPOTrainer), tmp_path, options={"replay": "none", "measure_engine": True, **options})


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "num_iterations": 2}])
def test_engines_routes_are_replayed_in_scoring_and_updates(settings, tmp_path):
    engine = Engine()
    options = {"replay": "R3", "rollout_func": engine.answer}
    trainer = make(routing_replay(spying(GRPOTrainer)), tmp_path, options=options, **settings)
    trainer.train()
    compared = 0
    for (_, *tokens), used in [*trainer.used, *trainer.forced.items()]:
        text = [token for token in tokens if token != TOKENIZER.pad_token_id]
        begin = next(i for i, token in enumerate(tokens) if token != TOKENIZER.pad_token_id)
        expected = engine.routes[tuple(text)]
        assert torch.equal(used[0, begin : begin + len(expected)], expected)
        compared += 1
    assert compared > 24
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
    assert set(logged(trainer, "routing/first_change").values()) == {0.0}
    assert min(logged(trainer, "routing/engine_slot_change").values()) > 0.3  # its routers are others
    assert logged(trainer, "clip_ratio/region_mean")[1] == 0  # the ratio is 1: both passes took the same experts


def test_the_probe_replays_what_the_old_policy_chose_itself(tmp_path):
    """As without an engine: what it is called in metrics.md, and nothing where no weight has moved."""
    options = {"replay": "R3", "rollout_func": Engine().answer}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=options, learning_rate=0.0, max_steps=2)
    trainer.train()
    for name in ("var_token_natural", "var_token_replayed", "var_sequence_replayed"):
        assert set(logged(trainer, f"routing/{name}").values()) == {0.0}
    assert min(logged(trainer, "routing/engine_slot_change").values()) > 0.3


@pytest.fixture
def server(monkeypatch):
    """TRL holds no engine then, only a client, which keeps the server's weights up to date."""
    from trl.trainer import grpo_trainer

    class Client:
        vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})

        def __init__(self, **settings):
            self.mode, self.synced = settings["mode"], 0

        def sync_weights(self):
            self.synced += 1

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Client)
    return {"use_vllm": True, "vllm_mode": "server", "max_steps": 2}


def test_one_update_of_a_batch_leaves_the_engine_to_be_measured(server, tmp_path):
    server |= {"steps_per_generation": 1}
    options = {"replay": "none", "rollout_func": Forced().answer}
    with pytest.raises(RoutingError, match="the ratio is 1 by construction"):
        make(routing_replay(GRPOTrainer), tmp_path, options=options, **server)
    options["measure_engine"] = True
    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options=options, **server)
    assert list(logged(trainer, "routing/engine_gap_mean")) == [1, 2]
    assert set(logged(trainer, "routing/first_change").values()) == {0.0}


def test_routes_of_a_server_come_from_rollout_func(server, tmp_path):
    options = {"replay": "R3", "rollout_func": Engine().answer}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=options, **server)
    trainer.train()
    assert trainer.vllm_generation.synced == 1
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}


@pytest.mark.parametrize("family", ["DbrxForCausalLM", "LongcatFlashForCausalLM", "ZayaForCausalLM"])
def test_routers_that_rank_more_than_num_experts(family):
    model, tokens = moe(family).eval(), torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    routes, sampled = routes_of(model, tokens), SampledRoutes()
    arrays = [ids[:-1].numpy() for ids in routes.ids]
    sampled.take({"routed_experts": arrays}, [[0] * 3] * 2, [[0] * 4] * 2)
    found = sampled.routes(model, tokens, torch.ones_like(tokens), 4)
    assert torch.equal(found.ids[:, :-1], routes.ids[:, :-1])
    with torch.no_grad(), replay_routes(model, found) as forced:
        model(input_ids=tokens)
    assert forced.replayed_rows == forced.forced_rows > 0


def test_missing_routes_are_an_error(tmp_path):
    engine = Engine()
    options = {"replay": "R3", "rollout_func": lambda prompts, trainer: engine.answer(prompts, trainer, "experts")}
    with pytest.raises(RoutingError, match=r"for each of 16 sequences; got 0.*routed_experts"):
        make(routing_replay(GRPOTrainer), tmp_path, options=options).train()


def test_routes_of_another_length_are_an_error(tmp_path):
    engine = Engine()

    def short(prompts, trainer):
        found = engine.answer(prompts, trainer)
        return {**found, "routed_experts": [array[1:] for array in found["routed_experts"]]}

    with pytest.raises(RoutingError, match=r"rows of routes for .* tokens"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R3", "rollout_func": short}).train()


@pytest.mark.parametrize("options", [{"replay": "R3"}, {"replay": "none", "measure_engine": True}])
def test_routes_that_are_shifted_by_one_token_are_an_error(options, tmp_path):
    """They have the right shape and replay at a fraction of 1."""
    engine = Engine()
    engine.model = build_tiny(TINY, TOKENIZER)  # the policy itself

    def shifted(prompts, trainer):
        found = engine.answer(prompts, trainer)
        return {**found, "routed_experts": [np.roll(array, 1, axis=0) for array in found["routed_experts"]]}

    with pytest.raises(RoutingError, match="shifted by one token: row t holds those of token t-1"):
        trained(routing_replay(GRPOTrainer), tmp_path, options={**options, "rollout_func": shifted})


def test_without_an_engine_it_is_refused(tmp_path):
    with pytest.raises(RoutingError, match="here the trained model itself samples"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R3"})


def test_a_colocated_vllm_is_measured(monkeypatch, tmp_path):
    # vLLM itself is not installed here: stand-ins with the signatures that TRL 1.16 uses
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    class LLM:
        def __init__(self, **settings):
            self.settings, self.engine = settings, Forced()

        def generate(self, prompts):
            found = self.engine.answer(TOKENIZER.batch_decode(prompts), None)
            names = ("completion_ids", "logprobs", "routed_experts")
            outputs = [SimpleNamespace(**{name: found[name][i] for name in names}) for i in range(len(prompts))]
            return [SimpleNamespace(outputs=[one]) for one in outputs]

    class Colocated:
        def __init__(self, **settings):
            self.mode, self.llm = settings["mode"], vllm_generation.LLM()

        def sync_weights(self):
            pass

        def generate(self, prompts, **settings):
            outputs = [answer.outputs[0] for answer in self.llm.generate(prompts)]
            return prompts, [one.completion_ids for one in outputs], [[[x] for x in o.logprobs] for o in outputs], None

    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Colocated)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "max_steps": 1}
    options = {"replay": "none", "measure_engine": True, "probe_sequences": 100}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=options, **settings)
    trainer.vllm_generation.llm.generate([[2, 3]])  # as a callback may, or a batch that was interrupted
    trainer.vllm_generation.llm.engine.gaps.clear()
    trainer.train()
    assert trainer.vllm_generation.llm.settings == {"enable_return_routed_experts": True}
    gaps = trainer.vllm_generation.llm.engine.gaps[1:]
    expected = sum(map(abs, gaps)) / len(gaps)
    assert logged(trainer, "routing/engine_gap_mean")[1] == pytest.approx(expected, rel=1e-3)
    assert logged(trainer, "routing/engine_gap_mean_replayed")[1] < 1e-3 * expected


def test_vllm_is_asked_for_routes_and_heard(monkeypatch):
    # vLLM itself is not installed here: stand-ins with the signatures that TRL 1.16 uses
    from trl.generation import vllm_generation

    class LLM:
        def __init__(self, model, **settings):
            self.settings = settings

        def generate(self, prompts, sampling_params=None, use_tqdm=True):
            return [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=np.full((4, 2, 2), i))]) for i in prompts]

    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    sampled = SampledRoutes()
    with sampled.asked_of_vllm(True):
        engine = vllm_generation.LLM(model="x", seed=1)
    assert engine.settings == {"seed": 1, "enable_return_routed_experts": True}
    assert vllm_generation.LLM is LLM
    with sampled.asked_of_vllm(False):
        assert vllm_generation.LLM is LLM
    sampled.listen(engine)
    engine.generate([9])
    sampled.forget()  # of an evaluation
    answers = engine.generate([3, 5], sampling_params=None, use_tqdm=False)
    assert len(answers) == 2
    sampled.take(None, [[1, 2], [1, 2, 3]], [[1, 2, 3], [1, 2]])
    arrays, prompts, completions = sampled._batch
    assert [int(array[0, 0, 0]) for array in arrays] == [3, 5]
    assert (prompts, completions) == ([2, 3], [3, 2])
    with pytest.raises(RoutingError, match="got 0"):  # each answer counts once
        sampled.take(None, [[1]], [[1]])
    engine.generate([3])
    with pytest.raises(RoutingError, match="got 0"):  # of rollout_func, which may have put them into another order
        sampled.take({}, [[1]], [[1]])
