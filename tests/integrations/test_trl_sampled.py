"""R3 in TRL: the sampling engine's routes, from `rollout_func` or from vLLM's classes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError, record_routes, replay_routes

pytest.importorskip("trl", reason="needs `pip install moe_rl[trl]`")

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe, routes_of
from tiny_trl import TINY, TOKENIZER, logged, make, spying
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


def test_routes_of_a_server_come_from_rollout_func(monkeypatch, tmp_path):
    """TRL holds no engine then, only a client, which keeps the server's weights up to date."""
    from trl.trainer import grpo_trainer

    class Client:
        vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})

        def __init__(self, **settings):
            self.mode, self.synced = settings["mode"], 0

        def sync_weights(self):
            self.synced += 1

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Client)
    settings = {"use_vllm": True, "vllm_mode": "server", "max_steps": 2}
    options = {"replay": "R3", "rollout_func": Engine().answer}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=options, **settings)
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


def test_without_an_engine_it_is_refused(tmp_path):
    with pytest.raises(RoutingError, match="here the trained model itself samples"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R3"})


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
    sampled.take({}, [[1, 2], [1, 2, 3]], [[1, 2, 3], [1, 2]])
    arrays, prompts, completions = sampled._batch
    assert [int(array[0, 0, 0]) for array in arrays] == [3, 5]
    assert (prompts, completions) == ([2, 3], [3, 2])
    with pytest.raises(RoutingError, match="got 0"):  # each answer counts once
        sampled.take({}, [[1]], [[1]])
