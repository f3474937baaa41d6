"""The model written again in NumPy float64, one token at a time where it matters: slow, plain, independent of the JAX code.

B batch, T tokens, D model, E experts, K chosen, F width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ernie_jax.config import ModelConfig, segments_of

Array = np.ndarray


def oracle_moe(
    x: Array, gate: Array, bias: Array, gate_up: Array, down: Array, k: int, norm_min: float = 1e-12
) -> tuple[Array, Array]:
    """Routed experts on tokens x [N, D] with gate [E, D], gate_up [E, D, 2, F], down [E, F, D]: (outputs [N, D], chosen [N, K])."""
    out, chosen = np.zeros(x.shape), np.zeros((x.shape[0], k), int)
    for n, token in enumerate(x.astype(np.float64)):
        p = _softmax(gate.astype(np.float64) @ token)
        best = np.argsort(-(p + bias), kind="stable")[:k]
        weights = p[best] / max(p[best].sum(), norm_min)
        chosen[n] = best
        for expert, weight in zip(best, weights, strict=True):
            out[n] += weight * _gated(token, gate_up[expert], down[expert])
    return out, chosen


def oracle_logits(
    config: ModelConfig,
    params: Mapping[str, Array],
    input_ids: Array,
    segment_ids: Array | None = None,
    position_ids: Array | None = None,
) -> Array:
    """Logits [B, T, V] of a text model with SiLU, from its arrays by path (`variables_by_path` of its state)."""
    batch, tokens = input_ids.shape
    segments = np.ones((batch, tokens), int) if segment_ids is None else segment_ids
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens)) if position_ids is None else position_ids
    return _logits(config, params, _stream(config, params, input_ids, segments, positions))


def oracle_mtp_logits(
    config: ModelConfig, params: Mapping[str, Array], input_ids: Array, segment_ids: Array, position_ids: Array
) -> Array:
    """Logits [N, B, T, V] of the blocks of multi-token prediction, zeros taking the place of tokens of another document."""
    x, blocks = _stream(config, params, input_ids, segment_ids, position_ids), []
    for i in range(config.num_nextn_predict_layers):
        w = {path[len("mtp/block/") :]: a[i].astype(np.float64) for path, a in params.items() if path.startswith("mtp/block/")}
        embedded = np.zeros(x.shape)
        for b, t in np.ndindex(*input_ids.shape):
            if t + i + 1 < input_ids.shape[1] and segment_ids[b, t + i + 1] == segment_ids[b, t]:
                embedded[b, t] = params["embed/embedding"][input_ids[b, t + i + 1]]
        e, h = _rms(embedded, w["embedding_norm/scale"], config.rms_norm_eps), _rms(x, w["hidden_norm/scale"], config.rms_norm_eps)
        dim = config.hidden_size
        u = e @ w["projection/kernel"][:dim] + h @ w["projection/kernel"][dim:]
        layer = {path[len("layer/") :]: a for path, a in w.items() if path.startswith("layer/")}
        x = _layer(config, "dense", layer, u, segment_ids, position_ids)
        blocks.append(_logits(config, params, x))
    return np.stack(blocks)


def _stream(config: ModelConfig, params: Mapping[str, Array], input_ids: Array, segments: Array, positions: Array) -> Array:
    x: Array = params["embed/embedding"].astype(np.float64)[input_ids]
    for segment in range(len(segments_of(config))):
        plan = segments_of(config)[segment]
        for repeat in range(plan.repeats):
            for place, kind in enumerate(plan.unit):
                prefix = f"decoder/segments/{segment}/layers/{place}/"
                weights = {
                    path[len(prefix) :]: array[repeat].astype(np.float64)
                    for path, array in params.items()
                    if path.startswith(prefix)
                }
                x = _layer(config, kind, weights, x, segments, positions)
    return x


def _logits(config: ModelConfig, params: Mapping[str, Array], x: Array) -> Array:
    head = params["embed/embedding" if config.tie_word_embeddings else "lm_head/kernel"].astype(np.float64)
    logits: Array = _rms(x, params["norm/scale"].astype(np.float64), config.rms_norm_eps) @ head.T
    return logits


def _layer(config: ModelConfig, kind: str, w: Mapping[str, Array], x: Array, segments: Array, positions: Array) -> Array:
    normed = _rms(x, w["input_norm/scale"], config.rms_norm_eps)
    q, k, v = (np.einsum("btd,dhe->bthe", normed, w[f"attention/{name}_proj"]) for name in "qkv")
    q, k = _rotate(q, positions, config.rope_theta), _rotate(k, positions, config.rope_theta)
    group = config.num_attention_heads // config.num_key_value_heads
    attended = np.zeros(q.shape)
    for b, t in np.ndindex(*segments.shape):
        if segments[b, t] == 0:
            continue
        seen = np.flatnonzero(segments[b, : t + 1] == segments[b, t])
        for h in range(q.shape[2]):
            scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(config.head_dim)
            attended[b, t, h] = _softmax(scores) @ v[b, seen, h // group]
    x = x + np.einsum("bthe,hed->btd", attended, w["attention/o_proj"])
    normed = _rms(x, w["post_attention_norm/scale"], config.rms_norm_eps)
    flat = normed.reshape(-1, normed.shape[-1])
    if kind == "dense":
        y = _gated(flat, w["mlp/gate_up"], w["mlp/down"])
    else:
        assert config.moe is not None
        experts = (w["moe/experts/gate_up"], w["moe/experts/down"])
        y, _ = oracle_moe(flat, w["moe/router/gate"], w["moe/router/bias"], *experts, config.moe.num_experts_per_tok)
        y[segments.reshape(-1) == 0] = 0
        if config.moe.num_shared_experts:
            y = y + _gated(flat, w["moe/shared_experts/gate_up"], w["moe/shared_experts/down"])
    return x + y.reshape(x.shape)


def _gated(x: Array, gate_up: Array, down: Array) -> Array:
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (gate / (1 + np.exp(-gate)) * up) @ down


def _rms(x: Array, scale: Array, eps: float) -> Array:
    return scale * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rotate(x: Array, positions: Array, theta: float) -> Array:
    """Interleaved pairs as complex numbers, turned by exp(i position f)."""
    width = x.shape[-1]
    turn = np.exp(1j * positions[..., None, None] * theta ** (-np.arange(0, width, 2) / width))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
