"""Globs to files, local or on any path `etils.epath` reads."""

from __future__ import annotations

import glob
import posixpath
from collections.abc import Sequence
from pathlib import Path

from etils import epath

_MAGIC = frozenset("*?[")


def expand_paths(paths: str | epath.Path | Sequence[str | epath.Path]) -> list[epath.Path]:
    """Files that a glob, or any of a list of globs, matches: each once, sorted by path.

    A path that exists is taken as it is, whatever characters it has. `**` crosses folders on local paths; remote ones
    (`gs://`, `s3://`, ...) have no recursive globs. Folders that match are passed over.

    Raises:
      ValueError: nothing is given, or a pattern matches no file.
    """
    patterns = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    if not patterns:
        raise ValueError("no data files are given; expected a path, a glob or a list of them")
    files: dict[str, epath.Path] = {}
    for pattern in patterns:
        try:
            matched = [path for path in _matches(str(pattern)) if not path.is_dir()]
        except (KeyError, ImportError) as error:
            raise ValueError(f"cannot look for {str(pattern)!r}: addresses of this kind are not known here ({error})") from error
        if not matched:
            raise ValueError(f"no file matches {str(pattern)!r}; {_advice(str(pattern))}")
        files.update((str(path), path) for path in matched)
    return [files[name] for name in sorted(files)]


def _matches(pattern: str) -> list[epath.Path]:
    if not _MAGIC & set(pattern) or ("://" not in pattern and epath.Path(pattern).is_file()):
        path = epath.Path(pattern)
        return [path] if path.exists() else []
    if "://" not in pattern:
        # epath refuses "**", which on a local disk costs nothing out of the ordinary.
        return [epath.Path(found) for found in glob.glob(str(epath.Path(pattern).expanduser()), recursive=True)]  # noqa: PTH207
    if "**" in pattern:
        raise ValueError(f"{pattern!r}: '**' is for local paths; name each level of a remote path with '*'")
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if _MAGIC & set(part))
    return list(epath.Path("/".join(parts[:first])).glob("/".join(parts[first:])))


def _advice(pattern: str) -> str:
    path = epath.Path(pattern)
    if not _MAGIC & set(pattern) and path.is_dir():
        return f"it is a folder, give its files, for example {pattern.rstrip('/')}/*.jsonl"
    return "check the path and its spelling"


def file_size(path: epath.Path) -> int:
    """Bytes of the file."""
    # epath's stat of a local file looks its owner up by name, which fails in containers that run under a bare user id.
    return Path(path).stat().st_size if "://" not in str(path) else int(path.stat().length)


def names_below_common_folder(files: Sequence[epath.Path]) -> list[str]:
    """Names that stay the same when the folder that holds all the files moves."""
    full = [str(file) if "://" in str(file) else str(file.resolve()) for file in files]
    folders = [posixpath.dirname(name) for name in full]
    # Local and remote files, or two buckets, have no folder in common.
    if len({name.split("://")[0] if "://" in name else "" for name in full}) > 1:
        return full
    common = posixpath.commonpath(folders)
    return [posixpath.relpath(name, common) if common else name for name in full]
