"""What compiled training steps communicate, recorded in golden_collectives.json.

    python tests/plan/compiled_collectives.py [NAME ...]

compiles the steps of the file's runs, all or those named, for eight fake CPU devices, and writes bytes by kind and axis of their
first and last stage. To add a run, add an entry with its name and overrides. A step takes half a minute or more, so tests compile
few of them and take the file for the rest.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", _FLAGS)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ernie_jax.config import ModelConfig, MoEConfig
from ernie_jax.config.optimization import OptimizerConfig
from ernie_jax.config.pipeline import PipelineConfig
from ernie_jax.config.run import DataConfig, MeshConfig, MoETrainConfig, RunConfig
from ernie_jax.native import switched_off
from ernie_jax.plan.hlo import program_collectives
from ernie_jax.plan.pipeline_shares import pipeline_shares
from ernie_jax.testing import tiny_vl
from ernie_jax.train.remat_choice import compile_step
from ernie_jax.train.state import mesh_of, run_layout

GOLDEN = Path(__file__).with_name("golden_collectives.json")
Overrides = dict[str, Any]


def model_of(changes: Overrides) -> ModelConfig:
    """One dense layer and five of experts, 256 wide, with fields of ModelConfig or MoEConfig; `dense`: no experts, `vl`: images."""
    changes = dict(changes)
    dense, vl = changes.pop("dense", False), changes.pop("vl", False)
    moe = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=256, num_shared_experts=1, layer_start=1)
    config = ModelConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        moe=moe,
    )
    if vl:
        small = tiny_vl()
        moe = replace(moe, vision_intermediate_size=128)
        config = replace(config, moe=moe, vision=small.vision, mrope_section=(4, 4, 8))
    own = {name: value for name, value in changes.items() if hasattr(config, name)}
    of_experts = {name: value for name, value in changes.items() if name not in own}
    return replace(config, moe=None if dense else replace(moe, **of_experts), **own)


def run_of(overrides: Overrides) -> RunConfig:
    """A run of 32 rows of 256 tokens; `overrides` are fields of RunConfig and of its parts."""
    given = dict(overrides)
    model = model_of(given.pop("model", {}))
    parts: dict[str, Any] = {
        "mesh": MeshConfig(**given.pop("mesh")),
        "pipeline": PipelineConfig(**given.pop("pipeline", {})),
        "moe": MoETrainConfig(**{"balance_scope": "microbatch", **given.pop("moe", {})}),
        "optimizer": OptimizerConfig(**given.pop("optimizer", {})),
        "data": DataConfig(**{"kind": "standard_library", **given.pop("data", {})}),
    }
    return RunConfig(model=model, **{"steps": 9, "batch_size": 32, "seq_len": 256, **given}, **parts)


def by_kind_and_axis(uses: Any) -> dict[str, int]:
    """`kind axis` -> bytes."""
    found: dict[str, int] = {}
    for use in uses:
        key = f"{use.kind} {use.axis}"
        found[key] = found.get(key, 0) + use.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measured(run: RunConfig, hlo: str, stage: int) -> dict[str, int]:
    """Of a compiled step, for one stage."""
    return by_kind_and_axis(program_collectives(hlo, run.mesh.sizes, shares=pipeline_shares(run, stage)))


def compiled_text(run: RunConfig) -> str:
    """Optimised HLO of a run's step."""
    with switched_off():
        text: str = compile_step(run, run_layout(run, mesh_of(run))).as_text()
    return text


def entries_of(name: str, overrides: Overrides, hlo: str) -> list[dict[str, Any]]:
    """Of the file: a run's first and last stage."""
    run = run_of(overrides)
    stages = sorted({0, run.mesh.pipeline - 1})
    return [{"name": name, "overrides": overrides, "stage": s, "collectives": measured(run, hlo, s)} for s in stages]


def write(entries: list[dict[str, Any]]) -> None:
    """Puts entries in the place of those of the same name and stage."""
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else []
    table = {(entry["name"], entry.get("stage", 0)): entry for entry in [*known, *entries]}
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(table[key]) for key in sorted(table)) + "\n]\n")


def main(names: list[str]) -> None:
    """Compiles the runs of these names, or all, and writes their figures."""
    runs = {entry["name"]: entry["overrides"] for entry in json.loads(GOLDEN.read_text())}
    if unknown := set(names) - set(runs):
        raise SystemExit(f"no runs {sorted(unknown)} in {GOLDEN.name}; there are {sorted(runs)}")
    for name in names or sorted(runs):
        write(entries_of(name, runs[name], compiled_text(run_of(runs[name]))))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
