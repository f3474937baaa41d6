"""Start-up of one process among several hosts."""

from __future__ import annotations

import os

import jax

# The variables by which launchers tell a process who it is; see docs of jax.distributed.initialize for what JAX reads itself.
_ADDRESS, _COUNT, _INDEX = "ERNIE_COORDINATOR", "ERNIE_NUM_PROCESSES", "ERNIE_PROCESS_ID"


def initialize_hosts() -> None:
    """Join the other processes of a multi-host run, when there are any; call before the first use of a device.

    With `ERNIE_COORDINATOR` (host:port), `ERNIE_NUM_PROCESSES` and `ERNIE_PROCESS_ID` set, those are used. With
    `ERNIE_NUM_PROCESSES=auto`, JAX finds them itself (Slurm, Open MPI, Cloud TPU, Kubernetes). Otherwise the process runs alone.

    Raises:
      ValueError: only some of the three variables are set, or they are not numbers.
    """
    count = os.environ.get(_COUNT)
    if count is None and _ADDRESS not in os.environ and _INDEX not in os.environ:
        return
    if count == "auto":
        jax.distributed.initialize()
        return
    values = {name: os.environ.get(name) for name in (_ADDRESS, _COUNT, _INDEX)}
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ValueError(
            f"multi-host start-up needs {', '.join(values)} together (or {_COUNT}=auto); missing: {', '.join(missing)}"
        )
    try:
        num, index = int(str(values[_COUNT])), int(str(values[_INDEX]))
    except ValueError:
        raise ValueError(f"{_COUNT}={values[_COUNT]!r} and {_INDEX}={values[_INDEX]!r} must be whole numbers") from None
    if not 0 <= index < num:
        raise ValueError(f"{_INDEX}={index} must be between 0 and {_COUNT} - 1 = {num - 1}")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(str(values[_ADDRESS]), num_processes=num, process_id=index)
