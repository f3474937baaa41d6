"""FP8: numbers of 8 bits with a float32 scale for each tile of them, taken from the tile's own largest magnitude."""

from ernie_jax.nn.fp8.counts import Fp8Counts, count_losses
from ernie_jax.nn.fp8.emulation import announce_emulation
from ernie_jax.nn.fp8.formats import E4M3, E5M2, FP8_DTYPES, largest
from ernie_jax.nn.fp8.quantized import TILE, Quantized, quantize, quantize_rows, requantized_by_tokens

__all__ = [
    "E4M3",
    "E5M2",
    "FP8_DTYPES",
    "TILE",
    "Fp8Counts",
    "Quantized",
    "announce_emulation",
    "count_losses",
    "largest",
    "quantize",
    "quantize_rows",
    "requantized_by_tokens",
]
