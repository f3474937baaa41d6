"""python launch/train.py --config=configs/ernie_4_5_21b_a3b_pretrain.py --workdir=runs/21b

Pre-training of 21B-A3B as published for eight GPUs: 128 sequences of 4,096 tokens a step in eight parts, experts over eight
devices, ZeRO-1, orthogonal gate step of 1e-3. Balance statistics are those of a microbatch, as in the published recipe.
One block of multi-token prediction, with a weight of 0.3. FP8, which the published run used, is left out.
"""

import ml_collections

from ernie_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    # The published code initialises with sqrt(0.3333 / hidden_size), whatever its configuration file says.
    config.model.update({"preset": "ernie-4.5-21b-a3b", "initializer_range": (0.3333 / 2560) ** 0.5})
    config.steps = 670_000
    config.batch_size = 128
    config.seq_len = 4096
    config.accumulate = 8
    config.dtype = "bfloat16"
    config.remat = "full"
    config.seed = 42
    config.mesh.update({"data": -1, "expert": 8, "zero": 1})
    config.moe.update({"orthogonal_coef": 1e-3, "orthogonal_form": "step", "balance_scope": "microbatch"})
    config.loss.mtp_weight = 0.3
    # The decay begins at 0.9 of all steps: 603,000, the published end of the steady part.
    config.schedule.update({"kind": "wsd", "peak": 3.14e-4, "minimum": 3.14e-6, "warmup": 2000})
    config.data.paths = ("data/train/*.parquet",)
    config.data.eval_paths = ("data/heldout/*.parquet",)
    config.data.tokenizer = "tokenizer"
    config.checkpoint.update({"every": 1000, "keep": 5, "keep_every": 10_000})
    config.eval.update({"every": 1000, "batches": 32})
    return config
