"""A topology of one's own from a YAML file with the fields of `Topology`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml
from etils import epath

from ernie_jax.config.nearest import did_you_mean
from ernie_jax.plan.topology import Link, Topology


class _Loader(yaml.SafeLoader):
    """Plain data only, and 450e9 is a number: YAML 1.1 reads it as text, for want of a point and of the sign of its exponent."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789"))
_WHOLE = ("devices", "devices_per_node", "memory_bytes", "torus")
_TEXT = ("name", "platform", "device")


def load_topology(path: str | epath.Path) -> Topology:
    """Read a topology from a YAML file.

    Every field of `Topology` has a key of the same name. `flops` maps a dtype to FLOP/s; `intra` and `inter` hold
    the fields of `Link`. Optional are `torus`, `efficiency` and `sources`: what has no source of its own is put down to the
    file.

    Raises:
      ValueError: no such file, no mapping in it, an unknown or missing key, text where a number belongs, or values that
        `Topology` refuses; each with the file's name.
    """
    file = epath.Path(path)
    if not file.is_file():
        raise ValueError(f"topology file {path} does not exist; name a YAML file or a topology of the catalogue")
    try:
        values = yaml.load(file.read_text(), _Loader)  # A SafeLoader: plain data only.
    except yaml.YAMLError as error:
        raise ValueError(f"topology file {path} is no YAML: {error}") from error
    _mapping(f"topology file {path}", "", values)
    try:
        return _topology(values, str(path))
    except ValueError as error:
        raise ValueError(f"topology file {path}: {error}") from error


def _topology(values: Mapping[str, Any], path: str) -> Topology:
    fields = _checked("topology", Topology, values, optional=("sources", "torus"))
    for key in _TEXT:
        if not isinstance(fields[key], str):
            raise ValueError(f"topology.{key}={fields[key]!r}; expected text")
    for key in _WHOLE:
        if isinstance(fields.get(key), float) and fields[key].is_integer():
            fields[key] = int(fields[key])  # 80e9 bytes
    for key in ("flops", "sources"):
        _mapping("topology", key, fields.setdefault(key, {}))
    for key, source in fields["sources"].items():
        if not isinstance(source, str):
            raise ValueError(f"topology.sources.{key}={source!r}; expected text")
    for key in ("intra", "inter"):
        fields[key] = _link(key, fields[key])
    topology = Topology(**fields)
    given = dict.fromkeys(topology.constants, f"stated in {path}")
    return dataclasses.replace(topology, sources=given | dict(topology.sources))


def _link(level: str, values: Any) -> Link:
    _mapping("topology", level, values)
    fields = _checked(f"topology.{level}", Link, values)
    try:
        return Link(**fields)
    except ValueError as error:
        raise ValueError(f"topology.{level}: {error}") from error


def _checked(owner: str, kind: type, values: Mapping[str, Any], *, optional: tuple[str, ...] = ("efficiency",)) -> dict[str, Any]:
    """The values, with neither a key too many nor one too few."""
    known = [field.name for field in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"unknown key {owner}.{key}{did_you_mean(str(key), known)}; there are {', '.join(known)}")
    missing = [key for key in known if key not in values and key not in optional]
    if missing:
        raise ValueError(f"{owner} lacks {', '.join(f'{owner}.{key}' for key in missing)}")
    return dict(values)


def _mapping(owner: str, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        where = f"{owner}.{key}" if key else owner
        shown = "nothing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{where} holds {shown}; expected a mapping of keys to values")
