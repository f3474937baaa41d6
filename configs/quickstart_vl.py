"""python launch/train.py --config=configs/quickstart_vl.py --workdir=runs/quickstart-vl

A small vision-language model, trained on text and on questions about images together: handwritten digits of scikit-learn at
several sizes beside the source text of the Python standard library. Vision tower, resampler, 3D positions, experts of their own
for each modality, on eight devices.
"""

import ml_collections

from ernie_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.model.preset = "quickstart-vl"
    config.steps = 300
    config.log_every = 10
    config.batch_size = 32
    config.seq_len = 128
    config.mesh.update({"data": 4, "expert": 2})
    config.schedule.update({"kind": "wsd", "peak": 1e-3, "minimum": 1e-5})
    # References, so that `--config.steps=100` scales the schedule with it.
    config.schedule.warmup = config.get_ref("steps") // 20
    config.schedule.steady_end = config.get_ref("steps") // 2
    config.moe.update({"aux_loss_coef": 1e-2, "orthogonal_coef": 1e-2, "bias_update_rate": 3e-3})
    # An answer is one or two tokens, a text more than a hundred: without a weight the texts would drown the images.
    config.loss.update({"multimodal_weight": 10.0})
    config.data.update({"kind": "digits", "text_weight": 0.02, "max_bytes": 1_000_000, "max_patches": 512})
    config.checkpoint.update({"every": 0, "keep": 1})
    # At the end alone.
    config.eval.update({"batches": 6})
    config.eval.every = config.get_ref("steps")
    return config
