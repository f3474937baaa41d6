"""A model's weights as published tensors, produced a run of rows at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ernie_jax.checkpoint.extra_tensors import ExtraTensors, is_mtp
from ernie_jax.checkpoint.host_blocks import host_block
from ernie_jax.checkpoint.hub_tensors import Block, HubTensor, hub_tensors, natural_order
from ernie_jax.checkpoint.placement import row_runs
from ernie_jax.checkpoint.safetensors_writer import Entry, format_of
from ernie_jax.checkpoint.weight_files import WeightFiles
from ernie_jax.config import config_to_hf
from ernie_jax.models import TextModel
from ernie_jax.moe.places import ExpertPlace
from ernie_jax.sharding import variables_by_path


class HubSource:
    """What an export writes: `entries`, the content of `config.json` as `config`, and the values by `produce`.

    Tensors of multi-token prediction are among them where the model has the blocks or carries the tensors along.

    Args:
      model: whose weights; with several processes all must make the same calls.
      dtype: format of the weights, None for that of the embedding. Router gates and biases are float32.
    """

    def __init__(self, model: TextModel, dtype: str | None) -> None:
        variables = variables_by_path(nnx.state(model))
        places = {path: np.asarray(v.get_value()) for path, v in variables.items() if isinstance(v, ExpertPlace)}
        arrays = {path: v.get_value() for path, v in variables.items() if path not in places}
        self._arrays: dict[str, jax.Array] = arrays
        self._tensors = hub_tensors(model.config, {path: array.shape for path, array in arrays.items()}, places)
        self._dtype = jnp.dtype(model.embed.embedding.dtype if dtype is None else dtype)
        weights, router = format_of(self._dtype.name), format_of("float32")
        self.entries = [Entry(t.name, router if t.float32 else weights, t.shape) for t in self._tensors.values()]
        extra: ExtraTensors | None = getattr(model, "extra_tensors", None)
        self._extra = None if extra is None else WeightFiles(extra.folder)
        if extra is not None:
            self.entries += [Entry(name, e.format, e.shape) for name, e in extra.entries().items()]
        self.entries.sort(key=lambda entry: natural_order(entry.name))
        # A checkpoint without the weights of a prediction block must not promise the block.
        kept = any(is_mtp(entry.name) for entry in self.entries)
        config = model.config if kept else dataclasses.replace(model.config, num_nextn_predict_layers=0)
        self.config: dict[str, Any] = config_to_hf(config, dtype=self._dtype.name)
        self.budget = 64 << 20

    def produce(self, entry: Entry) -> Iterator[np.ndarray]:
        """A tensor's values in runs of rows; of use on process 0 only."""
        tensor = self._tensors.get(entry.name)
        if tensor is None:
            yield from self._carried(entry)
        elif len(tensor.blocks) == 1:
            yield from self._rows(tensor.blocks[0], self._format(tensor))
        else:
            yield self._joined(tensor)

    def close(self) -> None:
        """Close the files of carried tensors."""
        if self._extra is not None:
            self._extra.close()

    def _format(self, tensor: HubTensor) -> np.dtype:
        return np.dtype(np.float32) if tensor.float32 else self._dtype

    def _rows(self, block: Block, dtype: np.dtype) -> Iterator[np.ndarray]:
        array = self._arrays[block.path]
        region = block.region(array.shape)
        outer = block.axes.hub[0][0]
        if isinstance(outer, int):
            yield self._values(block, array, region).astype(dtype)
            return
        dim, sizes = block.axes.ours.index(outer), block.axes.sizes(array.shape)
        total = math.prod(block.axes.hub_shape(sizes)) * array.dtype.itemsize
        for run in row_runs(sizes[outer], total // sizes[outer], self.budget):
            yield self._values(block, array, (*region[:dim], run, *region[dim + 1 :])).astype(dtype)

    def _values(self, block: Block, array: jax.Array, region: tuple[slice, ...]) -> np.ndarray:
        free = tuple(slice(None) if place is None else 0 for place in block.place)
        return block.axes.to_hub(host_block(array, region)[free])

    def _joined(self, tensor: HubTensor) -> np.ndarray:
        """A tensor that several of our arrays fill."""
        out = np.zeros(tensor.shape, self._format(tensor))
        for block in tensor.blocks:
            array = self._arrays[block.path]
            sizes = block.axes.sizes(array.shape)
            rows = block.axes.hub_region(sizes, {name: slice(0, size) for name, size in sizes.items()})
            out[rows] = self._values(block, array, block.region(array.shape))
        return out

    def _carried(self, entry: Entry) -> Iterator[np.ndarray]:
        assert self._extra is not None
        if jax.process_index() != 0:
            return
        rows = entry.shape[0] if entry.shape else 1
        for run in row_runs(rows, entry.nbytes // max(1, rows), self.budget):
            yield self._extra.read(entry.name, (run,) if entry.shape else None)
