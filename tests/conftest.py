"""Eight simulated devices for every test, and fixtures that several modules share."""

import gc
import os
import signal

import jax
import pytest
from compiled_once import AS_USERS_COMPILE, compile_fast, keep_programs

os.environ.setdefault("NPROC", "16")  # threads of XLA for CPU: collectives block some (see optimizer/owners/owners.py)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
compile_fast(not AS_USERS_COMPILE)
keep_programs()
if not AS_USERS_COMPILE:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the programs that tests start
gc.set_threshold(50_000, 10, 10)  # with Python's default (700), collections take 10% of the suite's time


@pytest.fixture(autouse=True)
def optimization(request):
    """Tests of rounding, memory or speed (marked `optimized`) always compile as users do."""
    compile_fast(not AS_USERS_COMPILE and request.node.get_closest_marker("optimized") is None)


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal():
    """Restores default signal handling, since programs that tests start inherit ignored and blocked signals: Ctrl-C in
    a shell's background, SIGHUP under nohup or once libtpu is loaded."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def eight_devices():
    """Asserts eight devices: with one, every test would pass."""
    assert jax.device_count() == 8


@pytest.fixture
def x64():
    """Double precision, so that rounding does not hide a wrong sum."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def count_compilations():
    """Calls a function, and returns the number of XLA compilations."""
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


@pytest.fixture
def as_on(monkeypatch):
    """`as_on("tpu")`: from now on, our code takes the branches for that platform."""
    from jaxshard import platforms

    def on(name):
        platform = platforms.named(name)
        assert platform.name == name
        monkeypatch.setattr(platforms, "of", lambda mesh: platform)
        monkeypatch.setattr(platforms, "here", lambda: platform)

    return on
