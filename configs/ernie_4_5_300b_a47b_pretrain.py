"""python launch/train.py --config=configs/ernie_4_5_300b_a47b_pretrain.py --workdir=runs/300b

Pre-training of 300B-A47B: 15,120 sequences of 4,096 tokens a step. The published run used 2,016 GPUs as pipeline 12 x
expert 8 x ZeRO-1 over 168. Here ZeRO and stages split matrices along the model width, 8,192, which neither 12 nor 168 divides,
so the mesh below takes a power of two of devices, and a batch that it divides: on 2,048, `--config.batch_size=15360
--config.accumulate=15`, or with stages `--config.mesh.tensor=1 --config.mesh.pipeline=8 --config.mesh.zero=1
--config.accumulate=1 --config.pipeline.microbatches=60`, one sequence a device and microbatch.
One block of multi-token prediction, with a weight of 0.3. FP8 in the experts, as the published run had it, is
`--config.precision=fp8`.
"""

import ml_collections

from ernie_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    # The published code initialises with sqrt(0.3333 / hidden_size), whatever its configuration file says.
    config.model.update({"preset": "ernie-4.5-300b-a47b", "initializer_range": (0.3333 / 8192) ** 0.5})
    config.steps = 256_760
    config.batch_size = 15_120
    config.seq_len = 4096
    config.accumulate = 15
    config.dtype = "bfloat16"
    config.remat = "full"
    config.seed = 666
    config.mesh.update({"data": -1, "tensor": 2, "expert": 8, "zero": 3})
    config.moe.balance_scope = "microbatch"
    config.loss.mtp_weight = 0.3
    # The decay begins at 0.9 of all steps: 231,084, the published end of the steady part.
    config.schedule.update({"kind": "wsd", "peak": 2.2e-4, "minimum": 2.2e-5, "warmup": 200})
    config.data.paths = ("data/train/*.parquet",)
    config.data.eval_paths = ("data/heldout/*.parquet",)
    config.data.tokenizer = "tokenizer"
    config.checkpoint.update({"every": 100, "keep": 5, "keep_every": 10_000})
    config.eval.update({"every": 1000, "batches": 32})
    return config
