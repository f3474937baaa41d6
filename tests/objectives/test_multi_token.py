"""What is scored of multi-token prediction, by hand; its loss against NumPy; its gradients on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ernie_jax.config import ComputeConfig
from ernie_jax.objectives.multi_token import mtp_labels, mtp_scored
from ernie_jax.objectives.pretraining import TokenWeights
from ernie_jax.sharding import make_mesh, one_device_mesh, variables_by_path
from ernie_jax.testing import loss_and_gradients, oracle_mtp_logits, random_batch, tiny_moe, worst_difference
from ernie_jax.testing.gradients import initial_state

# Two documents of four and three tokens, a place of padding; then a document that goes on behind the row, its third token unscored.
LABELS = jnp.array([[11, 12, 13, -100, 21, 22, -100, -100], [31, -100, 33, 34, 35, 36, 37, 38]])
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
WANTED = [
    [[12, 13, -100, -100, 22, -100, -100, -100], [-100, 33, 34, 35, 36, 37, 38, -100]],
    [[13, -100, -100, -100, -100, -100, -100, -100], [33, 34, 35, 36, 37, 38, -100, -100]],
]
CONFIG = tiny_moe(num_key_value_heads=4, num_nextn_predict_layers=2)
SETTINGS = {"token_weights": TokenWeights(mtp=0.3)}


def test_labels_stay_in_their_document():
    for block, wanted in enumerate(WANTED):
        np.testing.assert_array_equal(mtp_labels(LABELS, SEGMENTS, block), wanted)
    np.testing.assert_array_equal(mtp_scored(LABELS, SEGMENTS, 3), [9, 7, 5])


def test_rows_shorter_than_the_chain_score_nothing():
    for block in (0, 5):
        np.testing.assert_array_equal(mtp_labels(jnp.array([[7]]), jnp.array([[1]]), block), [[-100]])


@pytest.fixture(scope="module")
def batch():
    return random_batch(CONFIG, 8, 13)


@pytest.fixture(scope="module")
def one_device(batch):
    return loss_and_gradients(CONFIG, batch, one_device_mesh(), compute=ComputeConfig(mtp=True), **SETTINGS)


def test_the_loss_is_the_mean_over_blocks_and_enters_the_total_with_its_weight(batch, one_device):
    weights = {path: np.asarray(v[...]) for path, v in variables_by_path(initial_state(CONFIG, 0, True)).items()}
    logits = oracle_mtp_logits(CONFIG, weights, batch["input_ids"], batch["segment_ids"], batch["position_ids"])
    means = []
    for i, block in enumerate(logits):
        losses = []
        for b, t in np.ndindex(*batch["input_ids"].shape):
            target = t + i + 2
            if target < 13 and batch["segment_ids"][b, t] == batch["segment_ids"][b, target] > 0:
                p = np.exp(block[b, t] - block[b, t].max())
                losses.append(-np.log(p[batch["input_ids"][b, target]] / p.sum()))
        means.append(np.mean(losses))
    assert one_device.parts.mtp == pytest.approx(np.mean(means), rel=1e-5)
    off = loss_and_gradients(CONFIG, batch, one_device_mesh(), compute=ComputeConfig(mtp=True))
    assert off.parts.mtp is None and off.parts.loss == one_device.parts.loss
    assert one_device.loss - off.loss == pytest.approx(0.3 * np.mean(means), rel=1e-4)
    assert all(np.any(g) for path, g in one_device.gradients.items() if path.startswith("mtp/"))
    assert not any(np.any(g) for path, g in off.gradients.items() if path.startswith("mtp/"))


def test_without_its_weight_a_step_is_that_of_a_model_without_blocks(batch):
    on, off = (loss_and_gradients(CONFIG, batch, one_device_mesh(), compute=ComputeConfig(mtp=mtp)) for mtp in (True, False))
    assert on.loss == off.loss
    for path, gradient in off.gradients.items():
        np.testing.assert_array_equal(on.gradients[path], gradient, err_msg=path)


@pytest.mark.parametrize(
    ("sizes", "rules", "remat"),
    [
        ({"data": 2, "tensor": 2, "expert": 2}, "tp_sp", "full"),
        ({"expert": 8}, "fsdp", "attention"),
    ],
)
def test_any_mesh_equals_one_device(sizes, rules, remat, batch, one_device):
    compute = ComputeConfig(mtp=True, remat=remat)
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    found = loss_and_gradients(CONFIG, batch, mesh, compute=compute, rules=rules, **SETTINGS)
    assert found.loss == pytest.approx(one_device.loss, rel=1e-5)
    assert found.parts.mtp == pytest.approx(one_device.parts.mtp, rel=1e-5)
    assert worst_difference(found, one_device)[0] < 2e-5, worst_difference(found, one_device)
