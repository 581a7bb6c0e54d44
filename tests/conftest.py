"""Eight simulated devices for every test, and fixtures that several modules share."""

import os

import jax
import pytest
from compiled_once import keep_programs

# XLA leaves out its costly passes, which halves the tests' time. What is computed and what is moved stays the same, but
# for rounding; `make nightly` compiles as users do.
AS_USERS_COMPILE = os.environ.get("JAXSHARD_TESTS") == "as-users-compile"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", not AS_USERS_COMPILE)
if not AS_USERS_COMPILE:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the programs that tests start
keep_programs()


@pytest.fixture(autouse=True)
def optimization(request):
    """Tests of rounding or of speed, marked `optimized`, compile as users do, always."""
    as_users = AS_USERS_COMPILE or request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not as_users)


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
