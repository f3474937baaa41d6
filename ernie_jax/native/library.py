"""The kernels as a shared library: compiled once a machine, kept in the user's cache folder, and made known to XLA.

What is compiled depends on the processor (`-march=native`), so no wheel could carry it. A compiler is all it needs: `$CXX`, `c++`,
`g++` or `clang++`.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
# What the library gives to XLA, each under its own name.
TARGETS = (
    *("ernie_adamw", "ernie_attention_backward", "ernie_attention_forward"),
    *("ernie_gated", "ernie_gated_gradient", "ernie_grouped_rows", "ernie_grouped_weights"),
)


_switched_off: contextvars.ContextVar[bool] = contextvars.ContextVar("ernie_jax_native_off", default=False)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Inside, `auto` takes no native kernel.

    For programs that are traced to be counted or compiled and never run here: what a compiler sees of a native kernel is its name.
    """
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def missing() -> str | None:
    """Why `auto` cannot have the kernels here, None where it can.

    It can where they have been compiled, which this does if need be; it takes some 20 seconds, once a machine.
    """
    return "they are switched off" if _switched_off.get() else _missing()


@functools.cache
def _missing() -> str | None:
    if jax.default_backend() != "cpu":
        return f"they are for CPUs, and this is {jax.default_backend()!r}"
    try:
        load()
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def load() -> None:
    """Compiles the kernels unless this machine has them, and registers them with XLA.

    Raises:
      ValueError: no compiler, or one that fails, with what it said.
    """
    library = ctypes.CDLL(str(_compiled()))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def ffi_call(target: str, shapes: Any, aliases: dict[int, int] | None = None) -> Any:
    """The call of a kernel, to give its arguments and attributes to; under `vmap` one call an element.

    Args:
      target: one of `TARGETS`.
      shapes: of the results.
      aliases: argument -> the result that takes its place in memory.

    Raises:
      ValueError: no kernels here, see `load`.
    """
    load()
    return jax.ffi.ffi_call(target, shapes, vmap_method="sequential", input_output_aliases=aliases)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME/ernie_jax`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ernie_jax"


def _compiled() -> Path:
    compiler = _compiler()
    key = hashlib.sha256()
    for part in (" ".join(FLAGS), jaxlib.__version__, _processor(), _version(compiler)):
        key.update(part.encode())
    sources = sorted(SOURCES.glob("*.cc"))
    for path in sorted(SOURCES.glob("*.h")) + sources:
        key.update(path.read_bytes())
    name = f"kernels-{key.hexdigest()[:16]}.so"
    kept = cache_folder() / name
    if kept.exists():
        return kept
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
    except OSError:
        # Nowhere to keep them: this process alone will have them.
        folder = scratch = Path(tempfile.mkdtemp(prefix="ernie_jax-"))
    built = scratch / name
    command = [compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), *map(str, sources), "-o", str(built)]
    _log.info("compiling the native kernels into %s", folder)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        shutil.rmtree(scratch, ignore_errors=True)
        raise ValueError(
            f"the native kernels do not compile: {' '.join(command)} gave {result.returncode}:\n{result.stderr[-2000:]}\n"
            "set CXX to another compiler of C++17 (GCC 10 or newer), or name other kernels: attention='chunked', "
            "grouped_matmul='blocks'"
        )
    if folder == scratch:
        return built
    # Other processes may do the same at this moment: whoever comes last replaces an equal file.
    built.replace(kept)
    shutil.rmtree(scratch, ignore_errors=True)
    return kept


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise ValueError(
        f"the native kernels need a C++ compiler, found none of {', '.join((named,) if named else COMPILERS)}; "
        "install g++ or clang, or set CXX to one"
    )


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _processor() -> str:
    """What `-march=native` reads: the model and its instruction sets, without what changes from boot to boot."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model\t", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
