"""Runs whose communication is recorded (see `compiled_collectives`)."""

from __future__ import annotations

from typing import Any

RUNS: dict[str, dict[str, Any]] = {
    "vl-d2t2e2": {"model": {"vl": True}, "mesh": {"data": 2, "tensor": 2, "expert": 2, "zero": 1}, "remat": "full", "data": {"max_patches": 64}},
    "mtp-d2t2e2": {"model": {"num_nextn_predict_layers": 2}, "mesh": {"data": 2, "tensor": 2, "expert": 2}, "remat": "none"},
    "vl-p2d2e2": {"model": {"vl": True, "num_hidden_layers": 5}, "mesh": {"pipeline": 2, "data": 2, "expert": 2, "zero": 1}, "remat": "full", "data": {"max_patches": 64}, "pipeline": {"microbatches": 4}},
    "mtp-p2t2e2": {"model": {"num_nextn_predict_layers": 1, "num_hidden_layers": 5}, "mesh": {"pipeline": 2, "tensor": 2, "expert": 2, "zero": 1}, "remat": "full", "pipeline": {"microbatches": 4}},
    "int8-d2e4": {"mesh": {"data": 2, "expert": 4}, "remat": "full", "optimizer": {"gradient_compression": "int8"}, "accumulate": 2},
    "two-level-e8": {"mesh": {"expert": 8, "zero": 1}, "remat": "full", "moe": {"dispatch": "two_level", "expert_nodes": 2}},
    "fp8-chunks-d2e4": {"mesh": {"data": 2, "expert": 4, "zero": 1}, "remat": "none", "moe": {"exchange_dtype": "fp8", "exchange_chunks": 2}},
    "step-p2t2d2": {"model": {"num_hidden_layers": 6, "layer_start": 2}, "mesh": {"pipeline": 2, "tensor": 2, "data": 2, "zero": 1}, "remat": "full", "pipeline": {"microbatches": 4, "schedule": "gpipe"}, "moe": {"balance_scope": "step"}},
    "interval-t2e4": {"model": {"layer_interval": 2, "num_shared_experts": 0, "layer_start": 0}, "mesh": {"tensor": 2, "expert": 4, "zero": 1}, "remat": "full"},
    "untied-t2d4": {"model": {"tie_word_embeddings": False, "num_key_value_heads": 2}, "mesh": {"tensor": 4, "data": 2, "zero": 1}, "remat": "attention"},
}
