"""Questions about real images that a package ships: the handwritten digits of scikit-learn, rendered at several sizes.

The 1,797 digits are those of the UCI test set of optical recognition of handwritten digits, 8 x 8 pixels of 17 grey levels each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDES = (16, 32, 48)
QUESTIONS = ("Which digit is this?", "What number do you see?", "Read the digit.")
PAIR_QUESTION = "Which digits are these?"
_MANIFEST, _VERSION = "digits.json", 3
_TURN = 10.0  # degrees, most that a digit is turned either way


@dataclass(frozen=True, kw_only=True)
class DigitCorpus:
    """Two JSONL files of conversations, with their images beside them, and their numbers of conversations."""

    train_path: Path
    heldout_path: Path
    train_conversations: int
    heldout_conversations: int


def digit_corpus(
    folder: str | os.PathLike[str], *, held_out: int = 297, copies: int = 6, pairs: int = 600, seed: int = 0
) -> DigitCorpus:
    """Writes `train.jsonl`, `heldout.jsonl` and their images, or reuses what is there.

    Every digit is either for training or held out. One for training is rendered `copies` times, each time at another size and
    place, and a question asked about each; a held-out one once. Questions about two of these images at once are mixed in, for
    training `pairs`, held out a tenth of the number of digits.

    Args:
      folder: where the files go; made if missing.
      held_out: digits kept from training, 1 to 1,796.
      copies: questions for each digit of training.
      pairs: questions for two digits of training.
      seed: of the split, the sizes and the order.

    Raises:
      ValueError: scikit-learn is not installed, or a number out of range.
    """
    folder = Path(folder)
    request = {"version": _VERSION, "held_out": held_out, "copies": copies, "pairs": pairs, "seed": seed}
    corpus = _reusable(folder, request)
    if corpus is not None:
        return corpus
    images, labels = _digits()
    if not 1 <= held_out < len(images) or copies < 1 or pairs < 0:
        raise ValueError(
            f"held_out={held_out}, copies={copies}, pairs={pairs}; expected 1..{len(images) - 1}, at least 1, and at least 0"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    counts = []
    for name, chosen, repeats, number in (
        ("heldout", order[:held_out], 1, held_out // 10),
        ("train", order[held_out:], copies, pairs),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        records = list(_conversations(folder, name, images, labels, chosen, repeats, number, rng))
        lines = [json.dumps(records[i]) for i in rng.permutation(len(records))]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts.append(len(lines))
    corpus = _corpus(folder, counts[1], counts[0])
    # Last: a corpus that was cut off in the making has no such file.
    (folder / _MANIFEST).write_text(json.dumps({"request": request, "counts": [counts[1], counts[0]]}) + "\n")
    return corpus


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits are in scikit-learn, which is not installed; pip install 'ernie-jax[demo]'") from None
    found: Any = load_digits()
    return found.images, found.target


def _conversations(
    folder: Path,
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    chosen: Sequence[int] | np.ndarray,
    repeats: int,
    pairs: int,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    shown = np.repeat(np.asarray(chosen), repeats)

    def picture(place: int) -> dict[str, str]:
        return {"type": "image", "image": f"{name}/{place:05}.png"}

    for place, index in enumerate(shown):
        _render(images[index], rng).save(folder / picture(place)["image"], compress_level=1)
        yield _conversation([picture(place)], QUESTIONS[int(rng.integers(len(QUESTIONS)))], str(labels[index]))
    for _ in range(pairs):
        some = rng.choice(len(shown), 2, replace=False)
        yield _conversation([picture(i) for i in some], PAIR_QUESTION, " and ".join(str(labels[shown[i]]) for i in some))


def _conversation(pictures: Sequence[dict[str, str]], question: str, answer: str) -> dict[str, Any]:
    content = [*pictures, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _render(digit: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """The digit on a black square, filling most of it, somewhere within, a little turned, wider or narrower than it was."""
    side = int(rng.choice(SIDES))
    width, height = (round(side * rng.uniform(0.85, 1.0)) for _ in range(2))
    small = Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    small = small.rotate(float(rng.uniform(-_TURN, _TURN)), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (side, side))
    canvas.paste(small, (int(rng.integers(side - width + 1)), int(rng.integers(side - height + 1))))
    return canvas


def _corpus(folder: Path, train: int, heldout: int) -> DigitCorpus:
    return DigitCorpus(
        train_path=folder / "train.jsonl",
        heldout_path=folder / "heldout.jsonl",
        train_conversations=train,
        heldout_conversations=heldout,
    )


def _reusable(folder: Path, request: dict[str, int]) -> DigitCorpus | None:
    manifest = folder / _MANIFEST
    if not manifest.exists():
        return None
    found = json.loads(manifest.read_text())
    return _corpus(folder, *found["counts"]) if found["request"] == request else None
