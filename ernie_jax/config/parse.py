"""From the ConfigDict of a recipe (with its command-line overrides) to a validated RunConfig."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections
from etils import epath
from ml_collections import config_dict

from ernie_jax.config.hf import config_from_hf
from ernie_jax.config.model import ModelConfig, MoEConfig, VisionConfig
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.config.presets import PRESETS, preset
from ernie_jax.config.run import DataConfig, RunConfig


def default_config() -> ml_collections.ConfigDict:
    """Every key of a run with its default, for a recipe to fill in; `--config.mesh.expert=4` overrides any of them.

    `config.model.preset` names a preset or a folder with a Hugging Face `config.json`. Any other key of `config.model` (and
    of `config.model.moe`) replaces a field of that model.
    """
    config = ml_collections.ConfigDict({"steps": 100, "batch_size": 8, "seq_len": 256})
    config.model = _overrides(ModelConfig)
    config.model.preset = "quickstart"
    for run_field in dataclasses.fields(RunConfig):
        if run_field.name in config:
            continue
        if run_field.name == "data":
            config.data = _placeholders(DataConfig)
        elif run_field.default_factory is not dataclasses.MISSING:
            config[run_field.name] = _placeholders(typing.cast(type, run_field.default_factory))
        else:
            config[run_field.name] = _place(typing.get_type_hints(RunConfig)[run_field.name], run_field.default)
    return config


def _kind(hint: Any) -> Any:
    """The type of a field, without its `| None`."""
    if _is_union(hint):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _place(hint: Any, default: Any) -> Any:
    """What a ConfigDict holds for a field: its default, in a place that takes every value the field takes.

    A ConfigDict ties a key to one type. A field of several (a number or None, a name or a list) gets an open place, so that
    flags can say `None` or a list; `run_config_from` checks the type either way.
    """
    if not _is_union(hint) or typing.get_args(hint) == (str, types.NoneType):
        return config_dict.placeholder(_kind(hint)) if default is None else default
    return config_dict.FieldReference(default, field_type=object)


def _overrides(owner: type) -> ml_collections.ConfigDict:
    """An empty place for every field of a model (and of its sections), so that flags can override any of them."""
    hints = typing.get_type_hints(owner)
    section = ml_collections.ConfigDict()
    for f in dataclasses.fields(owner):
        kind = _kind(hints[f.name])
        nested = dataclasses.is_dataclass(kind)
        section[f.name] = _overrides(kind) if nested else config_dict.placeholder(typing.get_origin(kind) or kind)
    return section


def _placeholders(owner: type) -> ml_collections.ConfigDict:
    """The defaults of a dataclass, each in a place that a flag can set."""
    hints = typing.get_type_hints(owner)
    return ml_collections.ConfigDict({f.name: _place(hints[f.name], f.default) for f in dataclasses.fields(owner)})


def run_config_from(config: Mapping[str, Any] | ml_collections.ConfigDict) -> RunConfig:
    """The run a recipe describes.

    Raises:
      ValueError: an unknown key with the nearest known one, a value of the wrong type, or values that do not fit together.
    """
    plain = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else dict(config)
    model = plain.pop("model", None)
    if model is None:
        raise ValueError(f"config.model is missing; set config.model.preset to one of {', '.join(PRESETS)} or a folder")
    plain["model"] = _model(model)
    return _build(RunConfig, plain, "config")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is set: without the places nobody filled."""
    nested = {key: _given(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}


def _model(value: Any) -> ModelConfig:
    if isinstance(value, ModelConfig):
        return value
    fields = _given(value) if isinstance(value, Mapping) else {"preset": value}
    if "preset" not in fields:
        return _build(ModelConfig, fields, "config.model")
    name = fields.pop("preset")
    if not isinstance(name, str):
        raise ValueError(f"config.model.preset={name!r}; expected the name of a preset or a folder")
    if name in PRESETS:
        base = preset(name)
    elif epath.Path(name).exists():
        base = config_from_hf(name)
    else:
        raise ValueError(
            f"config.model.preset={name!r} is neither a folder with a config.json nor a preset{did_you_mean(name, PRESETS)}; "
            f"there are {', '.join(PRESETS)}"
        )
    merged = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    for section, owner in (("moe", MoEConfig), ("vision", VisionConfig)):
        if isinstance(fields.get(section), Mapping):
            current = getattr(base, section)
            known = {} if current is None else dataclasses.asdict(current)
            fields[section] = _build(owner, known | dict(fields[section]), f"config.model.{section}")
    return _build(ModelConfig, merged | fields, "config.model")


def _build(owner: type, values: Mapping[str, Any], path: str) -> Any:
    """A dataclass from a mapping, strict about names and types."""
    hints = typing.get_type_hints(owner)
    known = [f.name for f in dataclasses.fields(owner)]
    known_here = [*known, "preset"] if path == "config.model" else known
    for key in values:
        if key not in known:
            raise ValueError(
                f"unknown key {path}.{key}{_suggestion(str(key), known_here)}; {path} has {', '.join(sorted(known_here))}"
            )
    built = {key: _convert(hints[key], value, f"{path}.{key}") for key, value in values.items()}
    missing = [
        f.name
        for f in dataclasses.fields(owner)
        if f.name not in built and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(f'{path}.{name}' for name in missing)}")
    return owner(**built)


def _suggestion(key: str, known: list[str]) -> str:
    """The nearest key of the same section, else the place of that very key in another one."""
    elsewhere = [path for path in _paths(RunConfig, "config") if path.rsplit(".", 1)[1] == key]
    return f" (did you mean {elsewhere[0]!r}?)" if elsewhere else did_you_mean(key, known)


def _paths(owner: type, path: str) -> list[str]:
    """The full names of all keys of a section and the sections in it."""
    found = []
    for name, hint in typing.get_type_hints(owner).items():
        if not isinstance(getattr(owner, name, None), property):
            found.append(f"{path}.{name}")
            kind = _kind(hint)
            found += _paths(typing.cast(type, kind), f"{path}.{name}") if dataclasses.is_dataclass(kind) else []
    return found


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type, or a ValueError; int passes for float, a list for a tuple, nothing else is bent."""
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint if isinstance(hint, type) else ()):
            return value
        if isinstance(value, Mapping):
            return _build(typing.cast(type, hint), value, path)
        raise ValueError(f"{path}={value!r}; expected a section with keys {[f.name for f in dataclasses.fields(hint)]}")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        if isinstance(value, Mapping) and dataclasses.is_dataclass(_kind(hint)):
            # Its own errors say more than "none of the types fits".
            return _convert(_kind(hint), value, path)
        for option in arguments:
            try:
                return _convert(option, value, path)
            except ValueError:
                continue
        raise ValueError(f"{path}={value!r} ({type(value).__name__}); expected {_name(hint)}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}={value!r} ({type(value).__name__}); expected a list")
        inner = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(inner) != len(value):
            raise ValueError(f"{path}={value!r}; expected {len(inner)} entries, got {len(value)}")
        return tuple(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(inner, value, strict=True)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is types.NoneType and value is None:
        return None
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{path}={value!r} ({type(value).__name__}); expected {_name(hint)}")


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint).replace("NoneType", "None")
