"""Training data with images and videos: conversations and texts to batches. Nothing here imports jax."""

from ernie_jax.data.multimodal.assembly import FIGURES, assemble
from ernie_jax.data.multimodal.documents import TRAIN_ON, Document, DocumentEncoder
from ernie_jax.data.multimodal.evaluation import HeldoutMultimodalBatches, heldout_multimodal_batches
from ernie_jax.data.multimodal.mixture import Mixture, block_counts
from ernie_jax.data.multimodal.packing import OPEN_ROWS, PackedRow, Piece, RowPacker
from ernie_jax.data.multimodal.pipeline import make_multimodal_pipeline
from ernie_jax.data.multimodal.shape import BatchShape, RowLimits

__all__ = [
    "FIGURES",
    "OPEN_ROWS",
    "TRAIN_ON",
    "BatchShape",
    "Document",
    "DocumentEncoder",
    "HeldoutMultimodalBatches",
    "Mixture",
    "PackedRow",
    "Piece",
    "RowLimits",
    "RowPacker",
    "assemble",
    "block_counts",
    "heldout_multimodal_batches",
    "make_multimodal_pipeline",
]
