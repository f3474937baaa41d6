"""Tensors of a checkpoint that no module here uses, kept for the way back."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.checkpoint.weight_files import TensorEntry, WeightFiles


def is_mtp(name: str) -> bool:
    """Whether a published name belongs to a multi-token-prediction block (the rule transformers uses)."""
    return "mtp" in name


@dataclass(frozen=True)
class ExtraTensors:
    """Names of tensors that stay in the folder they came from; read from there when they are exported.

    Hashable, so that it can be a static attribute of a model, and no host memory is spent on it.
    """

    folder: str
    names: tuple[str, ...]

    def entries(self) -> dict[str, TensorEntry]:
        """Format and shape of each tensor.

        Raises:
          ValueError: the folder or a tensor is no longer there.
        """
        with WeightFiles(self.folder) as files:
            gone = [name for name in self.names if name not in files.entries]
            if gone:
                raise ValueError(f"{self.folder} no longer has {', '.join(gone)}, which the model was to carry along (mtp='keep')")
            return {name: files.entries[name] for name in self.names}
