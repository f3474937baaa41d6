"""A corpus every machine has: the source text of the running Python's standard library."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Not the library itself: installed packages, test suites (much of their text is data), compiled files.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MANIFEST = "corpus.json"
_FORMAT_VERSION = 3
# Whole files are up to a quarter of a million characters: a small batch would be one file for many steps on end.
_EXCERPT_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Two JSONL files, one document a line in the field `text`, and their sizes.

    Attributes:
      train_path, heldout_path: the files.
      train_bytes, heldout_bytes: UTF-8 bytes of the documents' text.
      train_documents, heldout_documents: number of documents.
    """

    train_path: Path
    heldout_path: Path
    train_bytes: int
    heldout_bytes: int
    train_documents: int
    heldout_documents: int


@dataclass(frozen=True)
class _Request:
    """What decides the corpus: equal requests give equal files."""

    version: int
    python: str
    max_bytes: int
    holdout_fraction: float
    seed: int


def _unit_hash(*parts: object) -> float:
    """Number in [0, 1) that depends on the parts alone, the same on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8")).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def _source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to the root with forward slashes, path) of every `.py` file that belongs to the library."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder) / name
            # Distributions link site-wide files of their own into the folder.
            if name.endswith(".py") and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _choose(root: Path, request: _Request) -> dict[str, list[tuple[str, str]]]:
    """Files (name, text) of each split, in an order given by the hash of the name."""
    budget = {"heldout": int(request.max_bytes * request.holdout_fraction)}
    budget["train"] = request.max_bytes - budget["heldout"]
    chosen: dict[str, list[tuple[str, str]]] = {"train": [], "heldout": []}
    files = sorted(_source_files(root), key=lambda file: (_unit_hash("order", request.seed, file[0]), file[0]))
    for name, path in files:
        split = "heldout" if _unit_hash("split", request.seed, name) < request.holdout_fraction else "train"
        raw = path.read_bytes()
        # A file that does not fit is passed over, so that a small budget is still filled with small files.
        if not raw or len(raw) > budget[split]:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        budget[split] -= len(raw)
        chosen[split].append((name, text))
    return chosen


def _excerpts(text: str) -> Iterator[str]:
    """Consecutive parts of a file that end at blank lines, each about `_EXCERPT_CHARACTERS` long; together they are the text."""
    excerpt = ""
    for paragraph in re.findall(r"(?s).*?\n\s*\n|.+$", text):
        if excerpt and len(excerpt) + len(paragraph) > _EXCERPT_CHARACTERS:
            yield excerpt
            excerpt = ""
        excerpt += paragraph
    if excerpt:
        yield excerpt


def _write_atomically(path: Path, text: str) -> None:
    """Replaces the file at once: several processes may make the same corpus, and one may be killed."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reusable(folder: Path, request: _Request) -> Corpus | None:
    """The corpus in the folder if it was made by an equal request and is whole, else None."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in manifest["file_bytes"].items())
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
    if manifest.get("request") != asdict(request) or not whole:
        return None
    return _corpus(folder, manifest["sizes"])


def _corpus(folder: Path, sizes: dict[str, int]) -> Corpus:
    return Corpus(train_path=folder / "train.jsonl", heldout_path=folder / "heldout.jsonl", **sizes)


def standard_library_corpus(
    folder: str | os.PathLike[str], *, max_bytes: int = 24_000_000, holdout_fraction: float = 0.05, seed: int = 0
) -> Corpus:
    """Writes `train.jsonl` and `heldout.jsonl` from the standard library's `.py` files, or reuses what is there.

    A document is an excerpt of a file, cut at blank lines. Which split a file belongs to depends on its name and the seed
    alone. Test folders, installed packages, empty files and files that are not UTF-8 are left out.
    Equal arguments on an equal Python give equal bytes.

    Args:
      folder: where the two files go; made if missing. A corpus made with other arguments is replaced.
      max_bytes: most text taken, in UTF-8 bytes, both splits together.
      holdout_fraction: share of the files, and of `max_bytes`, that is held out; strictly between 0 and 1.
      seed: another seed gives another split and order.

    Raises:
      ValueError: an argument is out of range, or a split would be empty.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; give a positive number of bytes")
    if not 0 < holdout_fraction < 1:
        raise ValueError(f"holdout_fraction is {holdout_fraction}; give a number strictly between 0 and 1")
    folder = Path(folder)
    request = _Request(_FORMAT_VERSION, platform.python_version(), max_bytes, holdout_fraction, seed)
    if found := _reusable(folder, request):
        return found
    root = Path(sysconfig.get_path("stdlib"))
    chosen = _choose(root, request)
    for split, documents in chosen.items():
        if not documents:
            raise ValueError(
                f"no .py file under {root} fits the {split} split with max_bytes={max_bytes} and "
                f"holdout_fraction={holdout_fraction}; raise max_bytes"
            )
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    file_bytes: dict[str, int] = {}
    for split, files in chosen.items():
        documents = [(name, part) for name, text in files for part in _excerpts(text)]
        lines = "".join(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n" for name, text in documents)
        _write_atomically(folder / f"{split}.jsonl", lines)
        file_bytes[f"{split}.jsonl"] = len(lines.encode("utf-8"))
        sizes[f"{split}_bytes"] = sum(len(text.encode("utf-8")) for _, text in documents)
        sizes[f"{split}_documents"] = len(documents)
    # Last: a manifest means that both files are whole.
    manifest = {"request": asdict(request), "sizes": sizes, "file_bytes": file_bytes}
    _write_atomically(folder / _MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return _corpus(folder, sizes)
