"""Loss and gradients of one batch on any mesh: both sides of every "equals one device" comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ernie_jax.config import ComputeConfig, ModelConfig
from ernie_jax.models import TextModel, abstract_model, batch_shardings, init_model, inputs_of
from ernie_jax.objectives.pretraining import LossParts, RouterLossWeights, TokenWeights, pretraining_loss
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.sharding import Layout, make_layout, state_shardings, variables_by_path


@dataclass(frozen=True)
class Evaluation:
    """Result of `loss_and_gradients`; `hlo` is the optimised program of one device."""

    loss: float
    gradients: dict[str, np.ndarray]
    parts: LossParts
    hlo: str


def random_batch(config: ModelConfig, batch: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch with padding on both sides and two documents in a row: arrays [batch, tokens] as the data pipeline gives them."""
    rng = np.random.default_rng(seed)
    segments = np.ones((batch, tokens), np.int32)
    segments[0, : tokens // 4] = 0
    segments[-1, tokens - tokens // 3 :] = 0
    segments[batch // 2, tokens // 2 :] = np.where(segments[batch // 2, tokens // 2 :] > 0, 2, 0)
    ids = rng.integers(3, config.vocab_size, (batch, tokens)).astype(np.int32)
    scored = (segments > 0) & (np.roll(segments, -1, 1) == segments) & (np.arange(tokens) < tokens - 1)
    return {
        "input_ids": ids,
        "labels": np.where(scored, np.roll(ids, -1, 1), -100).astype(np.int32),
        "segment_ids": segments,
        "position_ids": np.broadcast_to(np.arange(tokens, dtype=np.int32), (batch, tokens)).copy(),
    }


@functools.cache
def initial_state(config: ModelConfig, seed: int, mtp: bool = False) -> Any:
    """The state of a freshly initialised model on one device, with its blocks of multi-token prediction or without."""
    return nnx.state(init_model(config, ComputeConfig(mtp=mtp), seed=seed))


def loss_and_gradients(
    config: ModelConfig,
    batch: dict[str, np.ndarray],
    mesh: Mesh,
    *,
    compute: ComputeConfig = ComputeConfig(),
    rules: str = "tp_sp",
    weights: RouterLossWeights = RouterLossWeights(aux=0.1, z=0.01, orthogonal=0.1),
    token_weights: TokenWeights = TokenWeights(),
    seed: int = 0,
    edit: Any = None,
) -> Evaluation:
    """Pre-training loss of a batch and its gradient with respect to every parameter, on a mesh.

    Args:
      config: model shape.
      batch: as `random_batch` or `random_multimodal_batch` makes it.
      mesh: where to run; the same seed gives the same parameters on every mesh.
      compute, rules: how to run.
      weights: router losses.
      token_weights: how labels count.
      seed: of the parameters.
      edit: a function of the state that changes parameters before the run, for example to skew the routing.
    """
    layout, abstract, program = _program(config, mesh, compute, rules, weights, token_weights)
    # Initialised once on one device and then placed: an initialisation compiled for each mesh would take longer than the step.
    state = initial_state(config, seed, compute.mtp)
    state = jax.device_put(state if edit is None else edit(state), state_shardings(abstract, layout))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    placed = batch
    if config.vision is not None:
        # Rows that the batch shards do not divide stay whole; patches are always spread, as the pipeline spreads them.
        where = batch_shardings(layout, multimodal=True)
        shards = layout.shards("batch")
        placed = {key: jax.device_put(x, where[key] if len(x) % shards == 0 else layout.replicated) for key, x in batch.items()}
    compiled = program(params, rest, placed)
    (value, parts), gradients = compiled(params, rest, placed)
    arrays = {path: np.asarray(variable[...]) for path, variable in variables_by_path(gradients).items()}
    return Evaluation(float(value), arrays, jax.device_get(parts), compiled.as_text() or "")


@functools.lru_cache(maxsize=8)
def _program(
    config: ModelConfig, mesh: Mesh, compute: ComputeConfig, rules: str, weights: RouterLossWeights, token_weights: TokenWeights
) -> tuple[Layout, Any, Callable[..., Any]]:
    """Layout, abstract state, and arguments -> the compiled program: one for all batches of a shape, for tracing takes its time."""
    layout = make_layout(mesh, config, rules)
    graphdef, abstract = nnx.split(abstract_model(config, compute, layout))

    def loss(params: Any, rest: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, LossParts]:
        model: TextModel = nnx.merge(graphdef, params, rest)
        kinds = batch.get("document_kinds")
        blocks = config.num_nextn_predict_layers if compute.mtp else 0
        totals = StepTotals.of(batch["labels"], batch["segment_ids"], batch.get("modality_ids"), kinds, mtp_blocks=blocks)
        return pretraining_loss(model, inputs_of(batch), batch["labels"], totals, weights, token_weights, kinds)

    step, known = jax.jit(jax.value_and_grad(loss, has_aux=True)), {}

    def program(params: Any, rest: Any, batch: dict[str, jax.Array]) -> Any:
        kind = tuple((key, x.shape, getattr(x, "sharding", None)) for key, x in batch.items())
        if kind not in known:
            known[kind] = step.lower(params, rest, batch).compile()
        return known[kind]

    return layout, abstract, program


def worst_difference(one: Evaluation, other: Evaluation) -> tuple[float, str]:
    """Largest difference of any gradient, relative to that gradient's largest entry, and whose it is."""
    assert one.gradients.keys() == other.gradients.keys()
    differences = []
    for path, gradient in one.gradients.items():
        scale = max(float(np.abs(gradient).max()), 1e-12)
        differences.append((float(np.abs(gradient - other.gradients[path]).max()) / scale, path))
    return max(differences)
