"""Look at this installation: versions, devices, flags, and a self-test of under a minute.

python launch/doctor.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "safetensors",
    "tokenizers",
    "numpy",
    "ml_collections",
)
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "LIBTPU_INIT_ARGS")


def versions() -> dict[str, str]:
    """Python, platform and the packages that matter."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def check_forward() -> str:
    """A tiny mixture-of-experts model equals its NumPy twin."""
    import jax
    import numpy as np
    from flax import nnx

    from ernie_jax.models import init_model
    from ernie_jax.sharding import variables_by_path
    from ernie_jax.testing import oracle_logits, tiny_moe

    config = tiny_moe()
    model = init_model(config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 8))
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(model(ids).logits)
    params = {path: np.asarray(v[...]) for path, v in variables_by_path(nnx.state(model)).items()}
    difference = float(np.abs(logits - oracle_logits(config, params, ids)).max())
    if difference > 1e-3:
        raise ValueError(f"logits differ from the NumPy model by {difference:.1e}; expected below 1e-3")
    return f"largest difference of logits {difference:.1e}"


def check_mesh() -> str:
    """Loss and gradients over all devices equal those of one."""
    import jax

    from ernie_jax.sharding import make_mesh, one_device_mesh
    from ernie_jax.testing import loss_and_gradients, random_batch, tiny_moe, worst_difference

    devices = jax.device_count()
    if devices == 1:
        return "one device, nothing to compare (XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight fake ones)"
    expert = 2 if devices % 2 == 0 else 1
    config = tiny_moe()
    batch = random_batch(config, devices, 8)
    with jax.default_matmul_precision("highest"):
        one = loss_and_gradients(config, batch, one_device_mesh())
        many = loss_and_gradients(config, batch, make_mesh(data=-1, expert=expert))
    difference, path = worst_difference(one, many)
    if difference > 1e-3:
        raise ValueError(f"gradient of {path} differs by {difference:.1e} of its size between one and {devices} devices")
    return f"data {devices // expert} x expert {expert}: largest relative difference of gradients {difference:.1e}"


CHECKS: dict[str, Callable[[], str]] = {"forward pass": check_forward, "mesh equals one device": check_mesh}


def main() -> int:
    """Print the report; the exit code tells whether the checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-test", action="store_true", help="only versions, devices and flags")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    args = parser.parse_args()
    report: dict[str, Any] = {"versions": versions(), "flags": {v: os.environ[v] for v in VARIABLES if v in os.environ}}
    for section in ("versions", "flags"):
        print(section)
        for name, value in report[section].items():
            print(f"  {name:30s} {value}")
    try:
        import jax

        report["devices"] = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    except (ImportError, RuntimeError) as error:
        print(f"error: jax finds no device: {error}")
        return 2
    print(f"devices\n  {len(report['devices'])} of {report['devices'][0].split(' ', 1)[1]} ({jax.default_backend()})")
    report["checks"] = {}
    failed = 0
    for name, check in () if args.no_test else CHECKS.items():
        start = time.perf_counter()
        try:
            result = f"ok: {check()}"
        except (ValueError, RuntimeError, ImportError) as error:
            failed += 1
            result = f"FAILED: {error}"
        report["checks"][name] = result
        print(f"{name}\n  {result} ({time.perf_counter() - start:.0f} s)")
    print("everything works" if not failed else f"{failed} check(s) failed")
    if args.json:
        print(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
