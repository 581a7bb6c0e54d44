"""Eight simulated devices for every test, and fixtures that several modules share."""

import os
import pathlib

import jax
import pytest

# `make quick`: programs are compiled fast, and kept for all workers and for the next run. Not in CI: once, an aborted
# worker, whose cause is not found, ran so; and rounding is another.
FAST = os.environ.get("JAXSHARD_TESTS") == "fast"
COMPILED = pathlib.Path(__file__).parents[1] / ".cache" / "compiled"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
if FAST:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_max_size", 4 * 10**9)


@pytest.fixture(autouse=True)
def optimization(request):
    """Tests of rounding, marked `optimized`, compile as users do, always."""
    if FAST and request.node.get_closest_marker("optimized") is not None:
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)
    else:
        yield


@pytest.fixture(autouse=True, scope="session")
def eight_devices():
    """One device where eight were meant would make every test pass."""
    assert jax.device_count() == 8


@pytest.fixture
def x64():
    """Double precision: rounding no longer hides a wrong sum."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def count_compilations():
    """Calls a function, and returns how many XLA compilations that took."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def count(fn, *args):
        before = len(events)
        result = fn(*args)
        jax.block_until_ready(result)
        return len(events) - before, result

    yield count
    jax.monitoring.unregister_event_duration_listener(listen)
