"""All the ways in which a checkpoint does not fit a model, told at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ernie_jax.checkpoint.hub_tensors import HubTensor
from ernie_jax.checkpoint.weight_files import FLOAT_FORMATS, TensorEntry
from ernie_jax.config.nearest import nearest

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Nearest:
    """The known name most like another; layer and expert numbers are set aside first, so thousands of names stay cheap."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = set(known)
        self._by_form: dict[str, str] = {}
        for name in sorted(self._known):
            self._by_form.setdefault(_NUMBER.sub("{}", name), name)
        self._cache: dict[str, str | None] = {}

    def __call__(self, name: str) -> str | None:
        """The nearest name, with the numbers of `name` where that exists; None when nothing is close."""
        form = _NUMBER.sub("{}", name)
        if form not in self._cache:
            self._cache[form] = nearest(form, self._by_form)
        best = self._cache[form]
        if best is None:
            return None
        numbers = _NUMBER.findall(name)
        same_numbers = best.format(*numbers) if best.count("{}") == len(numbers) else None
        return same_numbers if same_numbers in self._known else self._by_form[best]


def check_fit(where: str, expected: Mapping[str, HubTensor], found: Mapping[str, TensorEntry]) -> None:
    """Compare what a model needs with what the files have.

    Raises:
      ValueError: listing every missing, unexpected, misshapen and non-float tensor, with the nearest name.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    both = [name for name in expected if name in found]
    lines = _list("missing", "perhaps stored as", missing, Nearest(unexpected))
    lines += _list("unexpected", "nearest expected name", unexpected, Nearest(expected))
    lines += [
        f"  wrong shape: {name} has {list(found[name].shape)}, expected {list(expected[name].shape)}"
        for name in both
        if found[name].shape != expected[name].shape
    ]
    lines += [
        f"  wrong format: {name} is {found[name].format}, expected one of {', '.join(FLOAT_FORMATS)}"
        for name in both
        if found[name].format not in FLOAT_FORMATS
    ]
    if lines:
        raise ValueError(f"{where}: {len(lines)} tensors do not fit the model that its config.json describes:\n" + "\n".join(lines))


def _list(kind: str, hint: str, names: list[str], close: Nearest) -> list[str]:
    lines = []
    for name in names:
        near = close(name)
        lines.append(f"  {kind}: {name}" + (f" ({hint}: {near})" if near else ""))
    return lines
