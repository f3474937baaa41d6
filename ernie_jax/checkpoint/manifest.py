"""A list of a checkpoint's files and sizes, written inside it before it is committed: what tells a whole one from a damaged one."""

from __future__ import annotations

import json

from etils import epath

MANIFEST = "files.json"


def write_manifest(folder: epath.Path) -> None:
    """Record every file below `folder` with its size."""
    sizes = {str(file.relative_to(folder)): file.stat().length for file in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1, sort_keys=True))


def damage(folder: epath.Path) -> str | None:
    """What is wrong with a checkpoint folder, None when all its files are there with their sizes."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return "incomplete: it has no list of its files" if any(folder.iterdir()) else "empty"
    try:
        sizes = json.loads(manifest.read_text())
        expected = {str(name): int(size) for name, size in sizes.items()}
    except (ValueError, AttributeError, TypeError) as error:
        return f"damaged: {MANIFEST} cannot be read ({error})"
    for name, size in expected.items():
        file = folder / name
        if not file.exists():
            return f"damaged: {name} is missing"
        length = file.stat().length
        # Files at the top are orbax's own notes, to which the commit may still add.
        if length < size or (length > size and "/" in name):
            return f"damaged: {name} has {length} of {size} bytes"
    return None


def _files(folder: epath.Path) -> list[epath.Path]:
    found: list[epath.Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found += _files(path)
        elif path.name != MANIFEST:
            found.append(path)
    return found
