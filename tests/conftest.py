"""Eight simulated devices for every test, and fixtures that several modules share."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


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
