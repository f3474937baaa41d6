import math

import numpy as np
import pytest

from ernie_jax.data import token_counts, unigram_entropy


def test_entropy_of_known_distributions():
    assert unigram_entropy(np.array([5, 5, 5, 5])) == pytest.approx(math.log(4), abs=1e-12)
    assert unigram_entropy(np.array([0, 7, 0])) == 0.0
    # 1/2, 1/4, 1/4: 1.5 bits.
    assert unigram_entropy(np.array([2, 1, 0, 1])) == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_labels_of_batches_are_counted_and_padding_is_not():
    batches = [{"labels": np.array([[1, 1, -100], [3, -100, -100]])}, {"labels": np.array([[5]])}]
    assert token_counts(batches).tolist() == [0, 2, 0, 1, 0, 1]
    assert unigram_entropy(batches) == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_nothing_to_count():
    with pytest.raises(ValueError, match="no token was counted"):
        unigram_entropy([{"labels": np.full((2, 3), -100)}])
    with pytest.raises(ValueError, match="no token was counted"):
        unigram_entropy([])
    with pytest.raises(ValueError, match=r"got shape \(1, 2\)"):
        unigram_entropy(np.ones((1, 2), np.int64))
    with pytest.raises(ValueError, match="lowest -1"):
        unigram_entropy(np.array([1, -1]))
