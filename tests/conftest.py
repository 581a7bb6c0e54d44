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
gc.set_threshold(50_000, 10, 10)  # as Python has it (700), a tenth of the suite's time goes into collections


@pytest.fixture(autouse=True)
def optimization(request):
    """Tests of rounding, memory or speed, marked `optimized`, compile as users do, always."""
    compile_fast(not AS_USERS_COMPILE and request.node.get_closest_marker("optimized") is None)


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal():
    """Programs that tests start inherit what is ignored or blocked here: Ctrl-C in a shell's background, SIGHUP under
    nohup and once libtpu is loaded."""
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


@pytest.fixture
def as_on(monkeypatch):
    """`as_on("tpu")`: from now on the code does on these devices what it does on that platform."""
    from jaxshard import platforms

    def on(name):
        platform = platforms.named(name)
        assert platform.name == name
        monkeypatch.setattr(platforms, "of", lambda mesh: platform)
        monkeypatch.setattr(platforms, "here", lambda: platform)

    return on
