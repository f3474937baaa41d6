"""Statistics of token streams. V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np


def token_counts(batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """How often each token is a label.

    Args:
      batches: with `labels` of any shape; negative ones are not counted.

    Returns:
      [V] int64, V one more than the largest label seen.
    """
    counts = np.zeros(0, np.int64)
    for batch in batches:
        labels = np.asarray(batch["labels"])
        found = np.bincount(labels[labels >= 0].ravel())
        size = max(len(counts), len(found))
        counts = np.pad(counts, (0, size - len(counts))) + np.pad(found, (0, size - len(found)))
    return counts


def unigram_entropy(tokens: np.ndarray | Iterable[Mapping[str, np.ndarray]]) -> float:
    """Entropy of the token frequencies, -sum p log p, in nats a token.

    It is the lowest loss on this very data of a model that knows frequencies and no context, so a held-out loss well under it
    shows that context is used.

    Args:
      tokens: counts [V] of each token, or batches whose `labels` are counted.

    Raises:
      ValueError: no token is counted, or a count is negative.
    """
    counts = np.asarray(tokens, np.float64) if isinstance(tokens, np.ndarray) else token_counts(tokens).astype(np.float64)
    if counts.ndim != 1 or np.any(counts < 0):
        raise ValueError(
            f"expected counts of shape [vocabulary], none negative; got shape {counts.shape}, lowest {counts.min(initial=0)}"
        )
    total = counts.sum()
    if total == 0:
        raise ValueError("no token was counted: every label is negative, or there are no batches")
    shares = counts[counts > 0] / total
    # Adding 0.0 turns the -0.0 of a single token into 0.0.
    return float(-np.sum(shares * np.log(shares)) + 0.0)
