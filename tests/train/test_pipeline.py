"""Every schedule on every kind of mesh equals one device, in loss, gradients and what is reported."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from ernie_jax.config.pipeline import PipelineConfig
from ernie_jax.models.batches import TEXT_KEYS
from ernie_jax.objectives.step_totals import StepTotals
from ernie_jax.parallel.pipeline import simulate
from ernie_jax.testing import collectives, multimodal_rows, tiny_dense, tiny_moe, tiny_vl
from ernie_jax.train.gradients import loss_weights, make_gradients, split_microbatches, token_weights_of
from ernie_jax.train.pipeline import PipelinedGradients
from ernie_jax.train.state import abstract_state, all_values, trained_values
from ernie_jax.train.step import make_eval_step, make_train_step

MOE = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "orthogonal_coef": 0.1, "balance_scope": "microbatch"}
# A dense layer and, to spread over stages, four MoE layers; or five, which two or four stages do not share evenly.
MODELS = {
    "even": tiny_moe(num_hidden_layers=5, num_experts_per_tok=2),
    # No layer before the spread ones: what the first stage starts from is the look-up itself.
    "dense": dataclasses.replace(tiny_dense(), num_hidden_layers=4),
    "uneven": tiny_moe(num_hidden_layers=6, num_experts_per_tok=2, tie_word_embeddings=False),
    "vl": tiny_vl(num_hidden_layers=4, num_experts_per_tok=2),
    # Sections before and behind the spread one, MoE layers among them.
    "ends": tiny_moe(num_hidden_layers=6, layer_start=0, layer_end=0, num_experts_per_tok=2),
    # The last stage looks embeddings up too, and its blocks' gradient of the tied table is a third part of it.
    "mtp": tiny_moe(num_hidden_layers=5, num_experts_per_tok=2, num_nextn_predict_layers=2),
}
TWO_LEVELS = {"dispatch": "two_level", "expert_nodes": 2}
LENGTH = 13  # no mesh axis divides it


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table; `moe` and `mesh` are sections of the run's configuration."""

    model: str
    sizes: dict
    schedule: str = "1f1b"
    virtual: int = 1
    moe: dict = dataclasses.field(default_factory=dict)
    zero: int = 0
    remat: str = "none"
    microbatches: int = 4

    @property
    def name(self):
        sizes = "x".join(f"{axis}{size}" for axis, size in self.sizes.items())
        extra = [f"zero{self.zero}"] * bool(self.zero) + [self.remat] * (self.remat != "none") + [str(v) for v in self.moe.values()]
        return "-".join([self.model, sizes, self.schedule, *extra])


CASES = [
    Case("even", {"pipeline": 2}, "gpipe"),
    Case("even", {"pipeline": 4, "data": 2}),
    Case("even", {"pipeline": 2, "expert": 2, "tensor": 2}, remat="full"),
    Case("even", {"pipeline": 2, "expert": 2}, "interleaved", 2, {"dispatch": "replicated"}),
    Case("even", {"pipeline": 2, "data": 2, "tensor": 2}, zero=3),
    Case("dense", {"pipeline": 4, "data": 2}, zero=1),
    Case("uneven", {"pipeline": 2, "data": 2}, moe={"balance_scope": "step"}, zero=1),
    Case("uneven", {"pipeline": 4, "expert": 2}, "gpipe", moe={"balance_scope": "step"}),
    Case("uneven", {"pipeline": 2, "tensor": 2}, "interleaved", 2, {"capacity_factor": 1.0}),
    Case("ends", {"pipeline": 2, "expert": 4}, moe={"exchange_chunks": 2} | TWO_LEVELS, microbatches=2),
    Case("mtp", {"pipeline": 2, "data": 2, "tensor": 2}, zero=1, remat="full"),
    Case("vl", {"pipeline": 2, "data": 2, "tensor": 2}),
    Case("vl", {"pipeline": 3}, "gpipe"),
]


@pytest.fixture(scope="module")
def run_of(tiny_run):
    def make(case, **changes):
        length = 24 if case.model == "vl" else LENGTH
        settings = {"model": MODELS[case.model], "batch_size": 8, "seq_len": length, "moe": MOE | case.moe, "remat": case.remat}
        return tiny_run(**settings | changes)

    return make


@pytest.fixture(scope="module")
def staged_run_of(run_of):
    def make(case, **changes):
        pipeline = PipelineConfig(schedule=case.schedule, microbatches=case.microbatches, virtual_stages=case.virtual)
        return run_of(case, mesh={**case.sizes, "zero": case.zero}, pipeline=pipeline, **changes)

    return make


@pytest.fixture(scope="module")
def data_of(batch_of):
    """The batch of a case: of a vision-language model, its images put where the mesh computes them."""

    def make(case, run, layout):
        if case.model != "vl":
            return batch_of(run)
        rows = multimodal_rows(run.model)
        return rows.batch(layout.shards("batch"), layout.shards("image_devices"), accumulate=run.parts)

    return make


@pytest.fixture(scope="module")
def one_device(run_of, layout_of, fresh_state, data_of):
    """What one device gets for the same microbatches, computed once for all cases with the same answer."""
    known = {}

    def compute(case, **changes):
        key = (case.model, case.microbatches, tuple(case.moe.items()), tuple(changes.items()))
        if key not in known:
            moe = {name: value for name, value in case.moe.items() if name in MOE or name == "capacity_factor"}
            run = run_of(dataclasses.replace(case, moe=moe, remat="none"), accumulate=case.microbatches, **changes)
            layout = layout_of(run)
            known[key], _ = gradients_of(run, layout, fresh_state(run, layout), data_of(case, run, layout))
        return known[key]

    return compute


def gradients_of(run, layout, state, batch):
    """Of a step, on the host, and the compiled program. Each product rounds to the compute format, rather than where the compiler
    fuses none behind it: programs that fuse differently can then be compared."""
    options = {"xla_allow_excess_precision": False}
    compiled = jax.jit(make_gradients(run, layout), compiler_options=options).lower(state, batch).compile()
    return jax.device_get(compiled(state, batch)), compiled.as_text()


def worst(got, want):
    """Largest difference, relative to the largest entry of its array."""
    return max((float(np.abs(got[path] - want[path]).max()) / max(float(np.abs(want[path]).max()), 1e-12), path) for path in want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages_equal_one_device(case, staged_run_of, layout_of, fresh_state, data_of, one_device, assert_close):
    run = staged_run_of(case)
    layout = layout_of(run, **case.sizes)
    (gradients, total, parts), hlo = gradients_of(run, layout, fresh_state(run, layout), data_of(case, run, layout))
    want_gradients, want_total, want_parts = one_device(case)
    assert gradients.keys() == want_gradients.keys()
    assert worst(gradients, want_gradients)[0] < 1e-5, worst(gradients, want_gradients)
    assert total == pytest.approx(want_total, rel=1e-5)
    assert_close(parts, want_parts, rtol=2e-5, atol=2e-5)
    check_collectives(hlo, case)


def check_collectives(hlo, case):
    """Sending to the next stage is the only permutation: on CPU every one waits for all devices, and stages take branches apart.
    Tokens go to experts of their own stage."""
    permutes = [line for line in hlo.splitlines() if re.search(r"= \S+ collective-permute(-start)?\(", line)]
    # Forwards and backwards; and the pass that counts the choices of a whole step before.
    expected = 3 if case.moe.get("balance_scope") == "step" else 2
    assert len(permutes) == expected and all("pipeline_send" in line for line in permutes), permutes
    # The mesh's outermost axis is that of the stages.
    devices = np.arange(np.prod(list(case.sizes.values()))).reshape(case.sizes["pipeline"], -1)
    stages = [set(numbers) for numbers in devices.tolist()]
    for found in collectives(hlo):
        if found.kind == "all-to-all" and "/while/body/" in found.name:
            assert found.groups and all(any(set(group) <= stage for stage in stages) for group in found.groups), found


def test_stages_in_bfloat16_equal_one_device_in_bfloat16(staged_run_of, layout_of, fresh_state, data_of, one_device):
    case = CASES[0]
    run = staged_run_of(case, dtype="bfloat16")
    layout = layout_of(run, **case.sizes)
    (gradients, total, _), _ = gradients_of(run, layout, fresh_state(run, layout), data_of(case, run, layout))
    want, want_total, _ = one_device(case, dtype="bfloat16")
    assert total == pytest.approx(want_total, rel=1e-2)
    norms = {path: np.linalg.norm(gradients[path] - want[path]) / np.linalg.norm(want[path]) for path in want}
    assert max(norms.values()) < 1e-2, norms


def test_images_in_bfloat16_stages_are_as_exact_as_on_one_device(staged_run_of, layout_of, fresh_state, data_of, one_device):
    """Near-tied experts flip in bfloat16, so the two differ: each is compared with float32."""
    case = next(case for case in CASES if case.model == "vl")
    run = staged_run_of(case, dtype="bfloat16")
    layout = layout_of(run, **case.sizes)
    (gradients, total, _), _ = gradients_of(run, layout, fresh_state(run, layout), data_of(case, run, layout))
    exact, exact_total, _ = one_device(case)
    rounded, _, _ = one_device(case, dtype="bfloat16")
    assert total == pytest.approx(exact_total, rel=1e-2)

    def distance(found):
        return np.sqrt(sum(np.sum((found[path] - exact[path]) ** 2) for path in exact))

    assert 0 < distance(gradients) < 1.5 * distance(rounded)


def test_stages_run_what_the_simulator_says(staged_run_of, layout_of, fresh_state, data_of):
    """Of virtual stages; `tests/launch/test_bench_pipeline.py` counts those of every schedule."""
    case = next(case for case in CASES if case.virtual > 1)
    run = staged_run_of(case)
    layout = layout_of(run, **case.sizes)
    gradients = PipelinedGradients.of(run, layout, loss_weights(run), token_weights_of(run))
    state, found = fresh_state(run, layout), simulate(gradients.timetable)
    active = _active(run, layout, gradients, state, data_of(case, run, layout))
    np.testing.assert_array_equal(active, found.active)


def _active(run, layout, gradients, state, batch):
    def run_ticks(state, batch):
        totals = StepTotals.of(batch["labels"], batch["segment_ids"])
        values = trained_values(run, state.params)
        fixed = {path: value for path, value in all_values(state).items() if path not in values}
        return gradients(values, fixed, split_microbatches(batch, run.parts), totals, count_first=False).active

    return jax.device_get(jax.jit(run_ticks)(state, batch))


def test_a_pipelined_run_steps_and_evaluates_as_one_device(staged_run_of, run_of, layout_of, fresh_state, data_of, assert_close):
    """The whole step: update, router bias, metrics; and the evaluation, whose batch is cut into microbatches too."""
    case = CASES[2]
    results = []
    for run, sizes in ((staged_run_of(case, accumulate=1), case.sizes), (run_of(case, accumulate=4), {})):
        layout = layout_of(run, **sizes)
        batch = data_of(case, run, layout)
        state, metrics = make_train_step(run, layout)(fresh_state(run, layout), batch)
        evaluated = make_eval_step(run, layout)(state, batch)
        kept = {name: metrics[name] for name in ("loss", "total", "grad_norm", "aux", "tokens")}
        results.append(jax.device_get((all_values(state), kept, metrics["router"]["load"], evaluated)))
    assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_pieces_of_a_chunked_exchange_stay_within_a_stage(staged_run_of, layout_of):
    case = dataclasses.replace(CASES[2], moe={"exchange_dtype": "int8", "exchange_chunks": 2})
    run = staged_run_of(case)
    layout = layout_of(run, **case.sizes)
    batch = {key: jax.ShapeDtypeStruct((8, LENGTH), np.int32) for key in TEXT_KEYS}
    hlo = jax.jit(make_gradients(run, layout)).lower(abstract_state(run, layout), batch).compile().as_text()
    check_collectives(hlo, case)


def test_what_cannot_be_staged_is_refused(staged_run_of, layout_of):
    too_many = Case("even", {"pipeline": 8})
    run = staged_run_of(too_many)
    with pytest.raises(ValueError, match="4 repeating layers cannot be spread over 8 pipeline stages"):
        make_gradients(run, layout_of(run, pipeline=8))
    run = staged_run_of(Case("even", {"pipeline": 2, "data": 4}))
    with pytest.raises(ValueError, match="batch_size=8 cannot be split into 4 microbatches"):
        make_gradients(run, layout_of(run, pipeline=2, data=4))
