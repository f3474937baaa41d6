"""The floors of the design: a module imports only from lower floors or from its own folder."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ernie_jax"
FLOORS = {
    "config": 0,
    "native": 0,
    "sharding": 1,
    "data": 1,
    "nn": 2,
    "parallel": 2,
    "moe": 3,
    "models": 4,
    "objectives": 5,
    "checkpoint": 5,
    "quant": 5,
    "train": 6,
    "serve": 6,
    "testing": 6,
    "plan": 7,
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE)


def imports(path):
    """Folders of this package that a file imports from, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ernie_jax" and len(parts) > 1 and parts[1] in FLOORS:
                yield parts[1], name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    folder = path.relative_to(PACKAGE).parts[0]
    assert folder in FLOORS, f"folder {folder} has no floor in the design"
    for target, name in imports(path):
        assert target == folder or FLOORS[target] < FLOORS[folder], f"{folder} (floor {FLOORS[folder]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_named_places_build_meshes_and_call_collectives(path):
    """Meshes come from sharding/; shard_map and collectives stand in moe's dispatch, parallel/ and sharding/."""
    relative = path.relative_to(PACKAGE).as_posix()
    text = path.read_text(encoding="utf-8")
    if not relative.startswith("sharding/"):
        assert "jax.make_mesh" not in text and "Mesh(" not in text
    if not relative.startswith(("moe/dispatch", "parallel/", "sharding/")):
        for call in ("shard_map", "lax.psum", "lax.all_to_all", "lax.all_gather", "lax.ppermute"):
            assert f"{call}(" not in text, f"{relative} calls {call}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_drawers_and_no_private_jax(path):
    assert path.stem not in ("utils", "util", "common", "misc", "helpers")
    text = path.read_text(encoding="utf-8")
    assert "jax._src" not in text and "flax.nnx._" not in text
    assert text.count("\n") <= 400, f"{path.name} has {text.count(chr(10))} lines; split it by idea"
