"""From conversations with images, and texts, to training batches whose position can be saved and found again exactly."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import grain
from grain.experimental import ThreadPrefetchIterDataset

from ernie_jax.data.fingerprint import data_fingerprint
from ernie_jax.data.multimodal.assembly import assemble, fits
from ernie_jax.data.multimodal.batches import MultimodalBatches
from ernie_jax.data.multimodal.documents import DocumentEncoder
from ernie_jax.data.multimodal.mixture import Mixture
from ernie_jax.data.multimodal.packing import RowPacker
from ernie_jax.data.multimodal.reader import DocumentReader
from ernie_jax.data.multimodal.shape import BatchShape, RowLimits
from ernie_jax.data.order import RecordOrder
from ernie_jax.data.pipeline import TrainIterator
from ernie_jax.data.sources import Paths, open_records

# Documents prepared ahead of the packing. Images are decoded outside Python's lock, so a few threads do not wait for each other.
_READ_THREADS = 4
_READ_AHEAD = 16


def make_multimodal_pipeline(
    *,
    sources: Sequence[tuple[Paths, float]],
    encoder: DocumentEncoder,
    shape: BatchShape,
    seed: int,
    format: str = "auto",
    text_field: str = "text",
    packing: str = "greedy",
    on_bad_record: str = "error",
    shuffle: bool = True,
    prefetch: int = 2,
) -> TrainIterator:
    """Endless training batches of this host, with the arrays that `assemble` describes, prepared ahead in threads.

    The batches depend on the arguments and the files alone, images included; `get_state` and `set_state` continue them exactly,
    from any batch. A state holds no pixels: `set_state` reads the documents of unfinished rows again.

    Where the images of a batch would put more than `shape.max_patches` on a device, its last rows with images are left to the next
    batch, and rows of padding stand for them; rows are packed so that this is rare.

    A JSONL record is a conversation, `{"messages": [...]}`, or a text, `{"text": "..."}`; other formats hold texts. A bad
    record is one that cannot be read, has an image that cannot be read, or has images and fits into no row or not on its devices.

    Args:
      sources: (paths, weight) of each. The weights are shares of documents, exact in each block, see `Mixture`; where a
        source ends it begins again, permuted anew.
      encoder: makes documents of records.
      shape: of the batches.
      seed: of the permutations.
      format: `text`, `jsonl`, `parquet`, or `auto` by suffix.
      text_field: field or column with the text.
      packing: `greedy` fills rows with several documents, `none` starts each document in its own row.
      on_bad_record: `error`, or `skip` and count in `skipped_records`.
      shuffle: permute each source's records anew in each of its epochs, from (seed, epoch).
      prefetch: batches prepared ahead; 0 does all work in `__next__`.

    Raises:
      ValueError: an argument is out of range, a pattern matches nothing, or a source has fewer records than there are hosts.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; expected 0 or more")
    if not sources:
        raise ValueError("no sources are given; expected (paths, weight) for each")
    limits = RowLimits.of(shape, merge_size=encoder.merge_size, largest_unit=encoder.largest_unit)
    make_packer = functools.partial(RowPacker, limits, packing=packing)
    make_packer()  # refuses wrong arguments here, not in a thread
    records = [open_records(paths, format=format, text_field=text_field) for paths, _ in sources]
    hosts = {"process_index": shape.process_index, "process_count": shape.process_count}
    orders = [RecordOrder(num_records=len(source), seed=seed, shuffle=shuffle, **hosts) for source in records]
    mixture = Mixture(orders, [weight for _, weight in sources])
    reader = DocumentReader(records, mixture.record, encoder, limits, on_bad_record=on_bad_record)
    ahead = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=_READ_AHEAD)
    reading = ahead if prefetch else grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = MultimodalBatches(
        grain.MapDataset.source(reader).to_iter_dataset(reading),
        reader,
        make_packer,
        functools.partial(fits, shape=shape, limits=limits),
        batch_assembly(encoder, shape),
        rows=shape.rows,
        steps_per_pass=mixture.steps_per_pass,
    )
    # Without max_patches the devices are not in it: they order the rows of a batch and place its images, and the batches keep their
    # documents. `on_bad_record` may change, as in the text pipeline.
    devices = {name: getattr(shape, name) for name in ("max_patches", "shards", "accumulate", "ranks")}
    fingerprint = data_fingerprint(
        reader.files,
        **encoder.fingerprint(),
        mixture=list(mixture.counts),
        text_field=text_field,
        seed=seed,
        shuffle=shuffle,
        seq_len=shape.seq_len,
        devices=None if shape.max_patches is None else devices,
        packing=packing,
        batch_size=shape.batch_size,
        **hosts,
    )
    return TrainIterator(iter(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)), reader, fingerprint)


def batch_assembly(encoder: DocumentEncoder, shape: BatchShape) -> functools.partial[dict]:
    """`assemble` with everything but the rows."""
    return functools.partial(
        assemble,
        shape=shape,
        merge_size=encoder.merge_size,
        patch_width=encoder.patch_width,
        pad_token_id=encoder.tokenizer.pad_token_id,
    )
