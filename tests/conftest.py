"""Every test runs on eight fake CPU devices, at the highest matmul precision, with compiled programs kept on disk."""

import gc
import importlib.metadata
import os
import tempfile
from pathlib import Path

# Before jax is imported: flags are read once, when the backend starts. Compiling is most of what these tests do, and
# their programs are tiny, so the code generator is told not to try hard.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
if importlib.metadata.version("jax").startswith("0.10."):
    # The older emitters compile in half the time; later versions have no such flag and would refuse it.
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

CACHE = Path(os.environ.get("ERNIE_TEST_CACHE", Path(tempfile.gettempdir()) / "ernie_jax_test_cache"))

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """Programs that earlier modules traced and compiled are let go once there are many: looking through them for garbage would take
    a growing part of the time, and the code of compiled ones counts against what a process may map."""
    gc.set_threshold(20_000, 20, 20)
    yield
    if len(gc.get_objects()) > 600_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def golden() -> Path:
    """Folder of the reference models and outputs of transformers 5.24."""
    return Path(__file__).parent / "golden"
