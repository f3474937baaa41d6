"""The ids of the tokens that stand for images and videos."""

from __future__ import annotations

import dataclasses

from ernie_jax.data.tokenizer import Tokenizer

# Names of the fields of `MediaTokens`, in order: the special tokens to give to `train_tokenizer`.
MEDIA_TOKENS = (
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|VIDEO_PLACEHOLDER|>",
    "<|VIDEO_START|>",
    "<|VIDEO_END|>",
)


@dataclasses.dataclass(frozen=True)
class MediaTokens:
    """Ids: one placeholder for each row of image or video features, and the markers around them.

    Baidu's own files have no video placeholder: there `video` is `image`, and the kind of a placeholder is told by its place.
    """

    image: int
    image_start: int
    image_end: int
    video: int
    video_start: int
    video_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MediaTokens:
        """Finds the ids by their published names.

        Raises:
          ValueError: a name other than the video placeholder's is missing.
        """
        known = tokenizer.special_tokens
        names = [name if name in known or name != "<|VIDEO_PLACEHOLDER|>" else MEDIA_TOKENS[0] for name in MEDIA_TOKENS]
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(
                f"the tokenizer has no special token {missing[0]!r}, which images and videos need; use a vision-language "
                "model's tokenizer, or train one with special_tokens=MEDIA_TOKENS"
            )
        return cls(*(known[name] for name in names))
