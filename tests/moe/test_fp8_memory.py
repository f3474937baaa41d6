"""What FP8 experts keep for the backward pass: half of bfloat16's bytes, in the traced and in the compiled step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from ernie_jax.config.run import DataConfig, RunConfig
from ernie_jax.models import batch_shardings
from ernie_jax.native import switched_off
from ernie_jax.sharding import one_device_mesh
from ernie_jax.testing import tiny_moe
from ernie_jax.train.gradients import make_gradients
from ernie_jax.train.program_flops import scan_parts
from ernie_jax.train.state import abstract_state, run_layout

LAYERS, BATCH, TOKENS, K, D, F = 4, 2, 256, 3, 32, 256


def parts(precision, remat):
    """(run, layout, abstract state, abstract batch) of four MoE layers behind a dense one."""
    model = tiny_moe(num_hidden_layers=LAYERS + 1, num_shared_experts=0)
    model = replace(model, moe=replace(model.moe, intermediate_size=F))
    run = RunConfig(
        model=model,
        steps=10,
        batch_size=BATCH,
        seq_len=TOKENS,
        precision=precision,
        remat=remat,
        data=DataConfig(kind="standard_library"),
    )
    layout = run_layout(run, one_device_mesh())
    batch = {key: jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32) for key in batch_shardings(layout, multimodal=False)}
    return run, layout, abstract_state(run, layout), batch


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)


def kept_for_experts(precision, remat):
    """Format -> bytes of arrays with a row an assignment that the forward scan over layers hands to the backward one."""
    run, layout, state, batch = parts(precision, remat)
    found = {}
    for scan in scans(jax.make_jaxpr(make_gradients(run, layout))(state, batch).jaxpr):
        for value in scan.outvars[scan_parts(scan)[1] :]:
            aval = value.aval
            if aval.shape[:2] == (LAYERS, BATCH * TOKENS * K) and jnp.issubdtype(aval.dtype, jnp.floating):
                found[aval.dtype.name] = found.get(aval.dtype.name, 0) + aval.size * aval.dtype.itemsize
    return found


ROWS = LAYERS * BATCH * TOKENS * K


@pytest.mark.parametrize(
    ("remat", "width", "scales"),
    [("none", 2 * F, 4), (("expert_gate_up",), 2 * F, 4), (("expert_in",), D, 1), (("expert_in", "expert_gate_up"), 2 * F + D, 5)],
)
def test_rows_are_kept_in_fp8_with_their_scales(remat, width, scales):
    assert kept_for_experts("fp8", remat) == {"float8_e4m3fn": ROWS * width, "float32": ROWS * scales * 4}
    assert kept_for_experts("bfloat16", remat) == {"bfloat16": ROWS * width * 2}


def test_the_compiled_step_is_smaller_by_it():
    """What keeping `expert_gate_up` adds to the temporary bytes of a step's gradients, over keeping nothing."""
    added = {}
    for precision in ("bfloat16", "fp8"):
        sizes = []
        for remat in ("full", ("expert_gate_up",)):
            run, layout, state, batch = parts(precision, remat)
            with switched_off():  # the products that both formats have in common
                compiled = jax.jit(make_gradients(run, layout)).lower(state, batch).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        added[precision] = sizes[1] - sizes[0]
    kept = ROWS * (2 * F + 4 * 4)
    assert added["fp8"] == pytest.approx(kept, rel=0.1)
    # At most: XLA:CPU holds a widened copy of bfloat16's beside it.
    assert added["fp8"] < 0.55 * added["bfloat16"]
