"""Models from published (or exported) Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from ernie_jax.checkpoint.extra_tensors import ExtraTensors, is_mtp
from ernie_jax.checkpoint.hub_tensors import Block, Region, hub_tensors
from ernie_jax.checkpoint.mismatch import check_fit
from ernie_jax.checkpoint.placement import assemble, row_runs
from ernie_jax.checkpoint.table import ALSO_STORED_AS
from ernie_jax.checkpoint.weight_files import WeightFiles
from ernie_jax.config import ComputeConfig, ModelConfig, config_from_hf
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.models import TextModel, abstract_model
from ernie_jax.moe.places import ExpertPlace, own_places
from ernie_jax.sharding import Layout, make_layout, map_variables, state_shardings, variables_by_path
from ernie_jax.sharding.rules import AxisRules

logger = logging.getLogger(__name__)

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Host memory of one piece relative to the largest file: a piece, its source and its copy on the way to a device exist at once.
_PIECES_A_FILE = 8
_SMALLEST_PIECE = 4 << 20


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: str | AxisRules = "tp_sp",
    dtype: str = "float32",
    mtp: str = "drop",
    progress: Callable[[int, int], None] | None = None,
    **compute: Any,
) -> TextModel:
    """A model with the weights of a Hugging Face folder, each device reading only what it keeps.

    Args:
      folder: has `config.json` and `model.safetensors` or `model.safetensors.index.json` with its files.
      mesh: where the model lives; one device by default.
      rules: sharding rules (a preset's name or a table); only used with a mesh.
      dtype: format of weights and activations; router gates and biases stay float32.
      mtp: what to do with the tensors of multi-token prediction, which only training uses: `"drop"`, `"load"` into the model's
        `mtp` blocks, or `"keep"` to have `save_pretrained` write them back untouched (they stay in `folder` until then).
      progress: called with the bytes that are placed and the bytes there will be, after each array.
      compute: further fields of `ComputeConfig`.

    Raises:
      ValueError: no such folder, a broken file, or tensors that do not fit the config; all of them are listed.
    """
    if mtp not in ("drop", "load", "keep"):
        raise ValueError(f"mtp={mtp!r}; expected 'drop', 'load' or 'keep'")
    options = _compute_config(dtype, {**compute, "mtp": mtp == "load"})
    with WeightFiles(folder) as files:
        files.rename(ALSO_STORED_AS)
        extra = _set_aside_mtp(files, mtp)
        config = _config(files)
        if mtp == "load" and not config.num_nextn_predict_layers:
            raise ValueError(
                f"{files.folder}: mtp='load', but its config.json has no num_nextn_predict_layers above 0; leave mtp out for a "
                "model without blocks of multi-token prediction"
            )
        layout = None if mesh is None else make_layout(mesh, config, rules)
        model = _load(files, config, options, layout, progress or (lambda done, total: None))
    if extra is not None:
        carrier: Any = model  # a static attribute that the class does not know
        carrier.extra_tensors = extra
    return model


def _compute_config(dtype: str, options: Mapping[str, Any]) -> ComputeConfig:
    known = {field.name for field in dataclasses.fields(ComputeConfig)}
    for name in options:
        if name not in known:
            raise ValueError(f"load_pretrained has no option {name!r}{did_you_mean(name, known)}; expected fields of ComputeConfig")
    return ComputeConfig(**{"dtype": dtype, "param_dtype": dtype} | dict(options))


def _set_aside_mtp(files: WeightFiles, mtp: str) -> ExtraTensors | None:
    names = tuple(name for name in files.entries if is_mtp(name))
    if not names or mtp == "load":
        return None
    kept = ExtraTensors(str(files.folder), names) if mtp == "keep" else None
    logger.info(
        "%s: %d multi-token-prediction tensors are %s",
        files.folder,
        len(names),
        "dropped (mtp='load' loads them, 'keep' carries them along)" if kept is None else "kept aside for export",
    )
    for name in names:
        del files.entries[name]
    return kept


def _config(files: WeightFiles) -> ModelConfig:
    if _HEAD in files.entries and _stated_tied(files) and _same_head(files):
        logger.info("%s: lm_head.weight repeats the embedding of a model that says it is tied; the embedding is used", files.folder)
        del files.entries[_HEAD]
    return config_from_hf(files.folder, tensor_names=files.shapes())


def _stated_tied(files: WeightFiles) -> bool:
    """Whether the config says, at the top or in its text part, that head and embedding are one."""
    path = files.folder / "config.json"
    try:
        values = json.loads(path.read_text()) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False  # the full reader tells what is wrong
    parts = [values, values.get("text_config")] if isinstance(values, dict) else []
    flags = [part.get("tie_word_embeddings") for part in parts if isinstance(part, dict)]
    return True in flags and False not in flags


def _same_head(files: WeightFiles) -> bool:
    head, table = files.entries[_HEAD], files.entries.get(_EMBEDDING)
    if table is None:
        return False  # reported as missing with everything else
    same = head.shape == table.shape and all(
        np.array_equal(files.read(_HEAD, (run,)), files.read(_EMBEDDING, (run,)))
        for run in row_runs(head.shape[0], 8 * max(1, *head.shape[1:]), _SMALLEST_PIECE)
    )
    if not same:
        raise ValueError(
            f"{files.folder}: config.json says tie_word_embeddings, but {_HEAD} {list(head.shape)} differs from {_EMBEDDING} "
            f"{list(table.shape)}; set tie_word_embeddings to false to use the stored head, or remove that tensor to tie"
        )
    return True


def _load(
    files: WeightFiles, config: ModelConfig, options: ComputeConfig, layout: Layout | None, progress: Callable[[int, int], None]
) -> TextModel:
    graphdef, abstract = nnx.split(abstract_model(config, options, layout))
    variables = variables_by_path(abstract)
    tensors = hub_tensors(config, {path: v.shape for path, v in variables.items() if not isinstance(v, ExpertPlace)})
    check_fit(str(files.folder), tensors, files.entries)
    blocks: dict[str, list[Block]] = defaultdict(list)
    for tensor in tensors.values():
        for block in tensor.blocks:
            blocks[block.path].append(block)
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    shardings = {} if layout is None else variables_by_path(state_shardings(abstract, layout))
    files.budget = max(files.largest_file // _PIECES_A_FILE, _SMALLEST_PIECE)
    total, done = sum(v.get_value().size * v.dtype.itemsize for v in variables.values()), 0

    def load(path: str, variable: nnx.Variable) -> jax.Array:
        nonlocal done
        where = one_device if layout is None else shardings[path].get_value()
        if isinstance(variable, ExpertPlace):
            layers, experts = variable.shape
            return jax.device_put(own_places(experts, layers), where)
        # Neighbours in a file are read one after the other.
        order = sorted(blocks[path], key=lambda block: files.entries[block.hub].file)
        dtype = np.dtype(variable.dtype)
        array = assemble(
            variable.shape,
            dtype,
            where,
            lambda region: read_region(files, order, variable.shape, region, dtype),
            budget=files.budget,
        )
        done += array.nbytes
        progress(done, total)
        return array

    model: TextModel = nnx.merge(graphdef, map_variables(load, abstract))
    return model


def read_region(files: WeightFiles, blocks: Sequence[Block], shape: Sequence[int], region: Region, dtype: np.dtype) -> np.ndarray:
    """A region of one of our arrays from the published tensors that lie in it, cast to its format."""
    out = np.empty([s.stop - s.start for s in region], dtype)
    for block in blocks:
        if not block.within(region):
            continue
        axes = block.axes
        sizes = axes.sizes(shape)
        want = {name: s for name, s in zip(axes.ours, region, strict=True) if isinstance(name, str)}
        source = files.read(block.hub, axes.hub_region(sizes, want))
        target = tuple(slice(None) if place is None else place - s.start for place, s in zip(block.place, region, strict=True))
        out[target] = axes.to_ours(source, sizes, want)
    return out
