"""Patterns of trained parameters."""

import pytest

from ernie_jax.config.trainable import trained_paths

PATHS = ["embed/embedding", "decoder/0/moe/experts/down", "decoder/0/moe/vision_experts/down", "vision_tower/norm/scale"]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["*"], [0, 1, 2, 3]),
        (["vision_tower/*"], [3]),
        (["*/vision_experts/*", "vision_tower/*"], [2, 3]),
        (["!vision_tower/*"], [0, 1, 2]),
        (["decoder/*", "!*vision*"], [1]),
        (["!vision_tower/*", "*"], [0, 1, 2]),
    ],
)
def test_patterns(patterns, kept):
    assert trained_paths(PATHS, patterns) == [PATHS[i] for i in kept]


def test_errors():
    with pytest.raises(ValueError, match=r"'vision_towr/\*' names no parameter .*begin with decoder, embed, vision_tower"):
        trained_paths(PATHS, ["vision_towr/*"])
    with pytest.raises(ValueError, match="leaves no parameter to train"):
        trained_paths(PATHS, ["!*"])
