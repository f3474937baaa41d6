"""Data: tokenizer, files, packing, training and held-out batches. Nothing here imports jax itself."""

from ernie_jax.data.corpus import Corpus, standard_library_corpus
from ernie_jax.data.evaluation import HeldoutBatches, heldout_batches
from ernie_jax.data.multimodal import HeldoutMultimodalBatches, heldout_multimodal_batches, make_multimodal_pipeline
from ernie_jax.data.packing import IGNORE, PACKING_MODES, Packer
from ernie_jax.data.pipeline import TrainIterator, make_pipeline
from ernie_jax.data.sources import FORMATS, BadRecordError, Records, open_records
from ernie_jax.data.statistics import token_counts, unigram_entropy
from ernie_jax.data.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "FORMATS",
    "IGNORE",
    "PACKING_MODES",
    "BadRecordError",
    "Corpus",
    "HeldoutBatches",
    "HeldoutMultimodalBatches",
    "Packer",
    "Records",
    "Tokenizer",
    "TrainIterator",
    "heldout_batches",
    "heldout_multimodal_batches",
    "make_multimodal_pipeline",
    "make_pipeline",
    "open_records",
    "standard_library_corpus",
    "token_counts",
    "train_tokenizer",
    "unigram_entropy",
]
