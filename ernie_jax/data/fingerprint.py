"""What a saved data position belongs to: files, tokenizer, hosts, batch shape. Compared before the position is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

# With more files the state keeps their digest only, so that a checkpoint stays small; their names are then not compared one by one.
_LISTED_FILES = 1000
_SHOWN_FILES = 5


def data_fingerprint(files: Sequence[tuple[str, int]], **settings: Any) -> dict[str, Any]:
    """JSON-serialisable fingerprint.

    Args:
      files: (name, size in bytes), in reading order.
      settings: everything else that decides the batches.
    """
    listing = [[name, size] for name, size in files]
    summary: dict[str, Any] = {
        "count": len(listing),
        "bytes": sum(size for _, size in files),
        "digest": hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest()[:16],
    }
    if len(listing) <= _LISTED_FILES:
        summary["listing"] = listing
    return {"files": summary, **settings}


def refuse_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """ValueError that lists every difference of two fingerprints, if there is one."""
    changes = []
    if saved.get("files", {}).get("digest") != current["files"]["digest"]:
        changes.append(f"files: {_changed_files(saved.get('files', {}), current['files'])}")
    for name in sorted((set(saved) | set(current)) - {"files"}):
        before, now = saved.get(name, "absent"), current.get(name, "absent")
        if before != now:
            changes.append(f"{name}: saved {before!r}, now {now!r}")
    if changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise ValueError(
            f"the saved data position is of other data or settings, so it cannot be continued exactly:{lines}\n"
            "Restore these, or start the data anew without the saved position."
        )


def _changed_files(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    counts = "saved {} files of {} bytes, now {} files of {} bytes".format(
        saved.get("count"), saved.get("bytes"), current["count"], current["bytes"]
    )
    if "listing" not in saved or "listing" not in current:
        return counts
    before, now = dict(saved["listing"]), dict(current["listing"])
    resized = [name for name in now if before.get(name, now[name]) != now[name]]
    kinds = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "size changed": [f"{name} ({before[name]} -> {now[name]} bytes)" for name in resized],
    }
    details = [f"{kind}: {_shorten(names)}" for kind, names in kinds.items() if names]
    return "; ".join([counts, *details])


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return ", ".join(names[:_SHOWN_FILES]) + more
