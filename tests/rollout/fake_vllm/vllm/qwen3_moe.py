"""Qwen3-MoE of a folder in hub format, one sequence at a time, in numpy: a second opinion on what transformers
computes, and it starts in a tenth of the time."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class Qwen3Moe:
    def __init__(self, folder: str):
        self.config = json.loads(Path(folder, "config.json").read_text())
        assert self.config["model_type"] == "qwen3_moe" and self.config["norm_topk_prob"], self.config
        assert not self.config["tie_word_embeddings"] and not self.config["mlp_only_layers"], self.config
        self.weights = load_file(Path(folder, "model.safetensors"))

    def forward(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and the chosen experts [T, L, K], the likeliest first."""
        x, routes = self.weights["model.embed_tokens.weight"][tokens], []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
            out, chosen = self._experts(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", x))
            x = x + out
            routes.append(chosen)
        return self._linear("lm_head", self._norm("model.norm", x)), np.stack(routes, 1)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config["rms_norm_eps"]))
        return self.weights[f"{name}.weight"] * (x / scale)

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        T, D = len(x), self.config["head_dim"]
        q, k, v = (self._linear(f"{name}.{part}_proj", x).reshape(T, -1, D) for part in "qkv")
        q, k = (self._rotated(self._norm(f"{name}.{part}_norm", y)) for part, y in (("q", q), ("k", k)))
        k, v = (y.repeat(q.shape[1] // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(D) ** 0.5
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        return self._linear(f"{name}.o_proj", np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(T, -1))

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """Rotary position embedding of [T, heads, D]; dimension d turns with d + D/2."""
        T, _, D = x.shape
        angles = np.arange(T)[:, None] * self.config["rope_parameters"]["rope_theta"] ** (-np.arange(0, D, 2) / D)
        cos, sin = (np.tile(f(angles), 2)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    def _experts(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gates = softmax(self._linear(f"{name}.gate", x))
        chosen = np.argsort(-gates, axis=-1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        kept = np.take_along_axis(gates, chosen, -1)
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, slot = np.nonzero(chosen == expert)
            gate, up = (self._linear(f"{name}.experts.{expert}.{part}_proj", x[rows]) for part in ("gate", "up"))
            y = self._linear(f"{name}.experts.{expert}.down_proj", gate / (1 + np.exp(-gate)) * up)
            out[rows] += (kept / kept.sum(-1, keepdims=True))[rows, slot, None] * y
        return out, chosen


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
