"""python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart

A small mixture-of-experts model on the source text of the Python standard library: every part of ERNIE 4.5 (grouped-query
attention, interleaved rotary positions, a dense first layer, shared experts, the aux-free router) on eight devices.
"""

import ml_collections

from ernie_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.model.preset = "quickstart"
    config.steps = 180
    config.log_every = 10
    config.batch_size = 8
    config.seq_len = 128
    config.mesh.update({"data": 2, "tensor": 2, "expert": 2})
    config.schedule.update({"kind": "wsd", "peak": 1.2e-3, "minimum": 1e-4})
    # References, so that `--config.steps=100` scales the schedule with it.
    config.schedule.warmup = config.get_ref("steps") // 6
    config.schedule.steady_end = config.get_ref("steps") * 3 // 4
    # So short a run has to balance its experts faster than a published one.
    config.moe.update({"aux_loss_coef": 1e-2, "bias_update_rate": 3e-3})
    config.data.kind = "standard_library"
    config.checkpoint.update({"every": 60, "keep": 2})
    config.eval.update({"every": 60, "batches": 8})
    config.sample.update({"prompt": "def __init__(self, ", "max_new_tokens": 48})
    return config
