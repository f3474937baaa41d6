import pytest

from ernie_jax.config import ComputeConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "fp8", r"dtype='fp8'; expected one of \('float32', 'bfloat16'\)"),
        ("param_dtype", "float16", r"param_dtype='float16'; expected one of.*did you mean 'bfloat16'"),
        ("attention", "flash", r"attention='flash'; expected one of \('auto', 'native', 'dense', 'chunked', 'cudnn'\)"),
        ("dispatch", "alltoall", r"did you mean 'all_to_all'"),
        ("dispatch", "two_level", r"dispatch='two_level' with expert_nodes=None; dispatch='two_level' needs the number of nodes"),
        ("expert_nodes", 2, r"dispatch='auto' with expert_nodes=2"),
        ("exchange_dtype", "float8", r"exchange_dtype='float8'; expected one of \('compute', 'bfloat16', 'fp8', 'int8'\)"),
        ("exchange_backward", "int4", r"exchange_backward='int4'.*did you mean 'int8'"),
        ("exchange_chunks", 0, r"exchange_chunks=0; expected at least 1"),
        ("exchange_order", "text", r"exchange_order='text'; expected one of \('together', 'text_first', 'vision_first'\)"),
        ("grouped_matmul", "block", r"did you mean 'blocks'"),
        ("loss_chunk", 0, r"loss_chunk=0"),
        ("capacity_factor", 0.0, r"capacity_factor=0\.0; expected a positive number, or None"),
        ("router_temperature", -1.0, r"router_temperature=-1\.0"),
    ],
)
def test_unknown_choices_are_refused_with_those_that_exist(field, value, message):
    with pytest.raises(ValueError, match=message):
        ComputeConfig(**{field: value})


def test_every_offered_choice_is_accepted():
    for dtype in ("float32", "bfloat16"):
        for attention in ("auto", "dense", "chunked", "cudnn"):
            for dispatch in ("auto", "local", "replicated", "all_to_all", "ragged"):
                assert ComputeConfig(dtype=dtype, attention=attention, dispatch=dispatch).param_dtype == "float32"
