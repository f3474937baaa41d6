"""python launch/train.py --config=configs/ernie_4_5_0_3b.py --workdir=runs/0.3b --config.data.paths="('data/*.parquet',)" \
    --config.data.tokenizer=tokenizer

The dense 0.3B model, sequences of 4,096 tokens, on however many devices there are.
"""

import ml_collections

from ernie_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.model.preset = "ernie-4.5-0.3b"
    config.steps = 100_000
    config.batch_size = 256
    config.seq_len = 4096
    config.accumulate = 4
    config.dtype = "bfloat16"
    config.remat = "full"
    config.mesh.update({"data": -1, "zero": 1})
    config.schedule.update({"kind": "wsd", "peak": 3e-4, "minimum": 3e-6, "warmup": 2000})
    config.data.paths = ("data/train/*.parquet",)
    config.data.eval_paths = ("data/heldout/*.parquet",)
    config.data.tokenizer = "tokenizer"
    config.checkpoint.update({"every": 1000, "keep": 3, "keep_every": 10_000})
    config.eval.update({"every": 1000, "batches": 32})
    return config
