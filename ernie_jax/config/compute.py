"""How a model is run: number formats, kernels, dispatch, recomputation. Nothing here changes what it computes, but for rounding."""

from __future__ import annotations

from dataclasses import dataclass

from ernie_jax.config.bounds import at_least
from ernie_jax.config.nearest import did_you_mean
from ernie_jax.config.remat import Remat, remat_plan

DTYPES = ("float32", "bfloat16")
PRECISIONS = (*DTYPES, "fp8")
FP8_FORMATS = ("e4m3", "e5m2")
ATTENTION = ("auto", "native", "dense", "chunked", "cudnn")
DISPATCH = ("auto", "local", "replicated", "all_to_all", "ragged", "two_level")
EXCHANGE_DTYPES = ("compute", "bfloat16", "fp8", "int8")
# What a run's `config.moe` and a model's ComputeConfig both say of the expert exchange.
EXCHANGE_FIELDS = ("dispatch", "exchange_dtype", "exchange_backward", "exchange_chunks", "exchange_order", "expert_nodes")
EXCHANGE_ORDER = ("together", "text_first", "vision_first")
GROUPED_MATMUL = ("auto", "native", "blocks", "ragged_dot", "pallas", "megablox", "dense")


def one_of(owner: str, field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{owner}.{field}={value!r}; expected one of {allowed}{did_you_mean(str(value), allowed)}")


def check_exchange(
    owner: str,
    *,
    dispatch: str,
    exchange_dtype: str | None,
    exchange_backward: str | None,
    exchange_chunks: int,
    exchange_order: str,
    expert_nodes: int | None,
) -> None:
    """Raise ValueError for settings of the expert exchange that do not exist or do not go together."""
    one_of(owner, "dispatch", dispatch, DISPATCH)
    for field, value in (("exchange_dtype", exchange_dtype), ("exchange_backward", exchange_backward)):
        if value is not None:
            one_of(owner, field, value, EXCHANGE_DTYPES)
    one_of(owner, "exchange_order", exchange_order, EXCHANGE_ORDER)
    at_least(owner, 1, exchange_chunks=exchange_chunks, expert_nodes=expert_nodes)
    if (dispatch == "two_level") != (expert_nodes is not None):
        raise ValueError(
            f"{owner}: dispatch={dispatch!r} with expert_nodes={expert_nodes}; dispatch='two_level' needs the number of nodes that "
            "the expert axis spreads over, and no other dispatch knows of nodes"
        )


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 products of the experts: E4M3 inputs with a scale per 1 x 128 activation tile and per 128 x 128 weight block.

    Attributes:
      gradient_format: of the gradients that are multiplied, `e4m3` (as the published recipe) or `e5m2` (more range within a
        tile, half the precision).
      weight_gradient: multiply in FP8 for the gradient of the weights too, both factors quantised anew in tiles of 128 tokens;
        without, it is made of the FP8 inputs that were kept and the gradients in the compute format.
    """

    gradient_format: str = "e4m3"
    weight_gradient: bool = False

    def __post_init__(self) -> None:
        one_of("config.fp8", "gradient_format", self.gradient_format, FP8_FORMATS)


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Choices of execution.

    Attributes:
      dtype: format of activations and of the inputs of matrix products.
      param_dtype: storage of parameters (routers stay float32).
      fp8: multiply in FP8 in the experts, with these settings; None multiplies in `dtype`.
      attention: kernel; `auto` is cuDNN on GPU in 16 bits, else dense up to `attention_chunk_from` tokens and chunked beyond.
      attention_chunk: tokens of a chunk of the chunked kernel.
      attention_chunk_from: longest sequence that `auto` gives to the dense kernel.
      remat: what the backward pass computes again (see config/remat.py): `none`, `full`, `attention`, `experts`, `vision`,
        `offload`, kinds of blocks with what becomes of them (`attention=full,experts=offload`), or the tags of the tensors to keep.
      dispatch: how tokens reach their experts; `auto` is local on one expert shard and all_to_all otherwise.
      exchange_dtype: format of rows on their way to the experts; None or `compute` leaves them in `dtype`, `bfloat16` is for
        results and gradients too, `fp8` and `int8` are for the rows alone (see `parallel.quantized_rows`).
      exchange_backward: format of gradients on their way back; None for `bfloat16` with rows in it and `compute` otherwise.
      exchange_chunks: parts of a device's tokens that are exchanged one by one, so that the experts of one can run meanwhile.
      exchange_order: whether rows of text and of vision share buckets, or which of them travel first in buckets of their own.
      expert_nodes: over how many nodes the expert axis spreads, for `dispatch="two_level"`.
      grouped_matmul: backend of the experts' products; `auto` picks by platform.
      capacity_factor: most load of an expert in a row, relative to the mean; None drops nothing.
      router_temperature: divides router scores; 1 is the published model.
      loss_chunk: tokens of a device whose logits exist at once in training.
      movable_experts: keep a table of where each expert stands among the weights, so that experts can change devices.
      mtp: have the model's blocks of multi-token prediction, which only training uses; without, their weights are not needed.
    """

    dtype: str = "float32"
    param_dtype: str = "float32"
    fp8: Fp8Config | None = None
    attention: str = "auto"
    attention_chunk: int = 128
    attention_chunk_from: int = 128
    remat: Remat = "none"
    dispatch: str = "auto"
    exchange_dtype: str | None = None
    exchange_backward: str | None = None
    exchange_chunks: int = 1
    exchange_order: str = "together"
    expert_nodes: int | None = None
    grouped_matmul: str = "auto"
    capacity_factor: float | None = None
    router_temperature: float = 1.0
    loss_chunk: int = 1024
    movable_experts: bool = False
    mtp: bool = False

    def __post_init__(self) -> None:
        for field in ("dtype", "param_dtype"):
            one_of("ComputeConfig", field, getattr(self, field), DTYPES)
        one_of("ComputeConfig", "attention", self.attention, ATTENTION)
        one_of("ComputeConfig", "grouped_matmul", self.grouped_matmul, GROUPED_MATMUL)
        check_exchange("ComputeConfig", **{name: getattr(self, name) for name in EXCHANGE_FIELDS})
        if self.remat != "auto":
            remat_plan(self.remat)
        for field in ("attention_chunk", "attention_chunk_from", "loss_chunk"):
            if getattr(self, field) < 1:
                raise ValueError(f"ComputeConfig.{field}={getattr(self, field)}; expected a positive number of tokens")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"ComputeConfig.capacity_factor={self.capacity_factor}; expected a positive number, or None for no limit"
            )
        if not self.router_temperature > 0:
            raise ValueError(f"ComputeConfig.router_temperature={self.router_temperature}; expected a positive number")
