"""Small checkpoints in the published layout, as plain numpy dicts, and what the checks compare."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file


class Folder:
    """A published checkpoint that a test can spoil: `tensors` and `config` are written by `write`."""

    def __init__(self, path, source):
        self.path = path
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = load_file(source / "model.safetensors")

    def write(self, files=1):
        """Write `files` files, tensors dealt out in turn, with an index when there are several."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        if files == 1:
            save_file(self.tensors, self.path / "model.safetensors", {"format": "pt"})
            return self.path
        mapping = {}
        for i in range(files):
            name = f"model-{i + 1:05}-of-{files:05}.safetensors"
            part = {key: self.tensors[key] for key in sorted(self.tensors)[i::files]}
            save_file(part, self.path / name, {"format": "pt"})
            mapping |= dict.fromkeys(part, name)
        total = sum(t.nbytes for t in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": mapping}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))
        return self.path

    def in_bfloat16(self):
        """Weights as published: bfloat16 but for gates and biases."""
        router = ("mlp.gate.weight", "mlp.gate.weight_1", "e_score_correction_bias")
        self.tensors = {k: v if k.endswith(router) else v.astype(ml_dtypes.bfloat16) for k, v in self.tensors.items()}
        self.config["dtype"] = "bfloat16"
        return self


@pytest.fixture
def spoilable(golden, tmp_path):
    """`spoilable("moe")`: a golden checkpoint to change before it is written to a fresh folder."""
    return lambda name: Folder(tmp_path / f"source_{name}", golden / name)


def _read_folder(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys(), "a tensor is in two files"
        tensors |= part
    return tensors


@pytest.fixture
def read_folder():
    """All tensors of a folder's files."""
    return _read_folder


@pytest.fixture
def assert_same_bits():
    def check(got, expected):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
            bits = f"u{value.dtype.itemsize}"
            np.testing.assert_array_equal(got[name].view(bits), value.view(bits), err_msg=name)

    return check
