"""The notebooks run from top to bottom, write nothing to stderr, draw their plots, and find what their text says."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = ("01_mesh_and_rules", "02_inside_a_router", "03_pipeline_schedules")


def _execute(name: str, facts: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The executed notebook and the values of `facts`, Python source of a dictionary over the notebook's names."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    probe = nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({facts}))", id="facts")
    notebook.cells.append(probe)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    # Compiled programs are kept where conftest.py keeps those of the other tests.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(jax.config.jax_compilation_cache_dir)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(folder), env=environment)
    _refuse_stderr(notebook)
    return notebook, json.loads(probe.outputs[0]["text"])


def _refuse_stderr(notebook: Any) -> None:
    written = [
        (cell.id, output.text)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert not written


def _images(notebook: Any) -> dict[str, int]:
    """Cell id -> number of plots it drew, for cells that drew any."""
    count = {
        cell.id: sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    return {cell: number for cell, number in count.items() if number}


@pytest.mark.parametrize("name", NAMES)
def test_stored_without_outputs(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_set_before_jax_is_imported(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert source.index("xla_force_host_platform_device_count=8") < source.index("import jax\n")


def test_mesh_and_rules(tmp_path: Path) -> None:
    facts = """{
        "devices": mesh.size,
        "wrong_size": wrong_size,
        "held": held,
        "copies": {
            rules: {
                name: len({p.tobytes() for p in held_slices(v[path].get_value(), first, down).values()})
                for name, (path, first, down, *_) in PICTURES.items()
            }
            for rules, v in by_path.items()
        },
        "counts": counts,
        "exchange": len(exchange),
        "losses": [reference.loss, *(run.loss for run in runs.values())],
        "worst": max(worst.values()),
    }"""
    notebook, found = _execute("01_mesh_and_rules", facts, tmp_path)
    assert _images(notebook) == {"memory": 1, "picture": 2, "collectives": 1, "differences": 1}
    assert found["devices"] == 8
    assert "tensor=3" in found["wrong_size"] and "needs 12 devices, but there are 8" in found["wrong_size"]
    # Distinct slices: tensor 2; tensor x expert 4 for experts; all 8 where `embed` is split over the data axes as well.
    assert found["copies"]["tp_sp"] == {"embedding": 2, "q_proj": 2, "experts gate_up": 4, "router gate": 1}
    assert found["copies"]["fsdp"] == {"embedding": 8, "q_proj": 8, "experts gate_up": 8, "router gate": 1}
    held = found["held"]
    assert held["one device"] / 8 < held["fsdp"] < held["tp_sp"] < held["one device"] / 2
    assert found["counts"]["fsdp"]["all-gather"] > found["counts"]["tp_sp"]["all-gather"]
    # Out: hidden states and expert numbers; back: hidden states; the same three in the backward pass.
    assert found["exchange"] == 6
    assert found["losses"] == pytest.approx([found["losses"][0]] * 3, rel=1e-5)
    assert found["worst"] < 1e-4


def test_inside_a_router(tmp_path: Path) -> None:
    facts = """{
        "chosen": corrected.expert_index.tolist(),
        "weights": corrected.weights.tolist(),
        "slope": float(abs(slope).max()),
        "balance": {name: float(rate[-20:].mean()) for name, rate in balance.items()},
        "cosine": {name: float(values[-1].mean()) for name, values in cosine.items()},
        "still": float(abs(history["nothing"]["bias"]).max()),
        "moves": sorted({round(float(m), 4) for m in abs(np.diff(history["bias"]["bias"], axis=0)).ravel()}),
        "loss": {name: float(record["loss"][-10:].mean()) for name, record in history.items()},
        "entropy": [float(entropy_rate), float(unigram_entropy)],
    }"""
    notebook, found = _execute("02_inside_a_router", facts, tmp_path)
    assert _images(notebook) == dict.fromkeys(("decision-plot", "stream", "loss", "load", "balance", "bias", "cosine", "gram"), 1)
    assert found["chosen"] == [0, 3]
    assert found["weights"] == pytest.approx([0.8, 0.2], abs=1e-6)
    assert found["slope"] == 0
    assert found["still"] == 0
    assert set(found["moves"]) <= {0.0, 0.01} and 0.01 in found["moves"]
    assert found["balance"]["bias"] > found["balance"]["nothing"] + 0.1
    assert found["balance"]["bias + orthogonal"] > found["balance"]["nothing"] + 0.1
    assert found["cosine"]["bias + orthogonal"] < 0.3 * found["cosine"]["bias"]
    # Every setting learns more than the token frequencies, and none beats the chain itself.
    low, high = found["entropy"]
    assert all(low < loss < high for loss in found["loss"].values())


def test_pipeline_schedules(tmp_path: Path) -> None:
    facts = """{
        "bubble": {name: found.bubble for name, found in simulations.items()},
        "duration": {name: found.duration for name, found in simulations.items()},
        "waiting": {name: [int(f.waiting.max()) for f in found] for name, found in grown.items()},
        "losses": [reference_loss, loss],
        "worst": max(difference.values()),
        "compared": len(difference),
        "split": list(split[8].values()) + list(split[32].values()),
        "whole": list(whole.values()),
    }"""
    notebook, found = _execute("03_pipeline_schedules", facts, tmp_path)
    assert _images(notebook) == dict.fromkeys(("tables", "growth", "differences"), 1)
    assert found["bubble"] == pytest.approx({"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19})
    # (v M + S - 1) (1 + 3) / v.
    assert found["duration"] == pytest.approx({"gpipe": 44, "1f1b": 44, "interleaved": 38})
    assert found["waiting"]["gpipe"] == [4, 8, 16, 32, 64]
    assert len(set(found["waiting"]["1f1b"][1:])) == len(set(found["waiting"]["interleaved"][2:])) == 1
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5)
    assert found["worst"] < 1e-5 and found["compared"] > 10
    # No schedule ends before each stage has done its work and the last stage has got its first input.
    work = [(1 + 2 + weights) * count for count in (8, 32) for weights in (1, 2, 3)]
    assert all(w + 3 <= time <= w + 9 for w, time in zip(work, found["split"], strict=True))
    # Against 44 and 140 whole.
    assert found["whole"] == [44, 140]
    assert found["split"][0] < 44 < found["split"][2] and found["split"][3] < 140 < found["split"][4]
