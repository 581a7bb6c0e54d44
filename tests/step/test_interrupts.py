"""Signals within a training step: what their handlers raise never loses params or state, and is never lost itself."""

import contextlib
import functools
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_once import fast_environment

import jaxshard
from jaxshard.system.interrupts import Interrupts

ROWS = np.ones((8, 8), "f")


def loss(p, batch):
    return jnp.mean(batch) * jnp.sum(p["w"])


def with_a_callback(p, batch):
    """JAX runs a step with a callback in Python: much happens between the dispatch and the return."""
    value = loss(p, batch)
    jax.debug.callback(lambda x: None, value)
    return value


def make(loss=loss, **options):
    """Every gradient is 1, and every step takes exactly 1/1024 of it."""
    tx = optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda count: -1 / 1024))
    opt = jaxshard.zero2(tx, jaxshard.make_mesh(), min_shard_size=8)
    start = {"w": jnp.ones((8, 16))}
    return jaxshard.train_step(loss, opt, **{"donate": True} | options), opt.place(start), opt.init(start)


def check_whole(p, state):
    """Params and state are live arrays, of one step."""
    assert not any(x.is_deleted() for x in jax.tree.leaves((p, state)))
    w, trace = np.float64(1), np.float64(0)
    for _ in range(int(state[1].count)):
        trace = 1 + trace / 2
        w -= trace / 1024
    assert np.all(np.abs(np.asarray(state[0].trace["w"]) - trace) < 1e-6)
    assert np.all(np.abs(np.asarray(p["w"]) - w) < 1e-4)


class Boxed:
    """A step within an object, as of a user's own class: Python's C code is between it and the caller."""

    def __init__(self, step):
        self.step = step

    def __call__(self, *args):
        return self.step(*args)


class Run:
    """Where a loop keeps its arrays, and what it was interrupted by."""

    def __init__(self, step, p, state):
        self.step, self.boxed, self.partial = step, Boxed(step), functools.partial(step)
        self.p, self.state = p, state


def in_variables(run):
    p, state = run.p, run.state
    try:
        for _ in range(2):
            p, state, _ = run.step(p, state, ROWS)
        wait()
    finally:
        run.p, run.state = p, state


def in_attributes(run):
    for _ in range(2):
        run.p, run.state, _ = run.step(run.p, run.state, ROWS)
    wait()


def in_a_dict(run):
    kept = {"p": run.p, "state": run.state}
    try:
        for _ in range(2):
            kept["p"], kept["state"] = run.step(kept["p"], kept["state"], ROWS)[:2]
        wait()
    finally:
        run.p, run.state = kept["p"], kept["state"]


def in_a_tuple(run):
    carry = (run.p, run.state, None)
    try:
        for _ in range(2):
            carry = run.partial(*carry[:2], ROWS)
        wait()
    finally:
        run.p, run.state, _ = carry


def through_an_object(run):
    p, state = run.p, run.state
    try:
        for _ in range(2):
            (
                p,
                state,
                _,
            ) = run.boxed(p, state, ROWS)
        wait()
    finally:
        run.p, run.state = p, state


def in_a_cell(run):
    """As a notebook runs it, where variables are global."""
    variables = {"p": run.p, "state": run.state, "step": run.step, "ROWS": ROWS, "wait": wait}
    cell = "for _ in range(2):\n    p, state, metrics = step(p, state, ROWS)\nwait()"
    try:
        exec(compile(cell, "a cell", "exec"), variables)
    finally:
        run.p, run.state = variables["p"], variables["state"]


LOOPS = [in_variables, in_attributes, in_a_dict, in_a_tuple, through_an_object, in_a_cell]


def wait():
    """What comes after the last step: what was put off comes here at the latest."""
    Tracer.counting = False
    for _ in range(100):
        time.sleep(0.002)


class Tracer:
    """Sends a signal before an instruction that Python runs in a loop of steps, as a debugger sees them.

    Instructions count from the moment before the second step's dispatch on.
    """

    counting = False

    def __init__(self, at, number):
        self.at, self.number, self.seen, self.steps = at, number, 0, 0

    def __call__(self, frame, event, _):
        frame.f_trace_opcodes = True
        if event == "call" and frame.f_code is Interrupts.begin.__code__:
            self.steps += 1
        if event == "opcode" and Tracer.counting and self.steps >= 2:
            self.seen += 1
            if self.seen == self.at:
                signal.raise_signal(self.number)
        return self


def traced(loop, run, at, number=signal.SIGINT):
    """(how many instructions were seen, the type of what the loop raised)."""
    before, tracer, raised = sys.gettrace(), Tracer(at, number), None
    sys._getframe().f_trace_opcodes = True
    sys.settrace(tracer)
    try:
        Tracer.counting = True
        loop(run)
    except (KeyboardInterrupt, TimeoutError) as error:
        raised = type(error)
    finally:
        sys.settrace(before)
        Tracer.counting = False
    return tracer.seen, raised


def interrupted_everywhere(loop, run, number=signal.SIGINT, *, each=1):
    """What came of signals at the instructions from a step's dispatch on, one loop for each."""
    for _ in range(2):  # the first fills caches
        total, _ = traced(loop, run, -1)
    assert total > 100
    found = []
    for at in range(1, total - 2, each):
        seen, raised = traced(loop, run, at, number)
        found += [raised] if seen >= at else []  # else the garbage collector's own instructions were fewer this time
        check_whole(run.p, run.state)
    assert len(found) > 0.9 * (total - 3) // each
    return found


@contextlib.contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_interrupt_at_any_instruction_loses_nothing(loop):
    step, p, state = make()
    with handling(signal.SIGINT, signal.default_int_handler), step:
        assert set(interrupted_everywhere(loop, Run(step, p, state))) == {KeyboardInterrupt}


@pytest.mark.parametrize("loop", [in_variables, in_a_cell])
def test_an_interrupt_within_jaxs_own_python(loop):
    step, p, state = make(with_a_callback)
    with handling(signal.SIGINT, signal.default_int_handler), step:
        assert set(interrupted_everywhere(loop, Run(step, p, state), each=17)) == {KeyboardInterrupt}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_handlers_of_users_that_raise(number):
    def too_long(number, frame):
        raise TimeoutError(number)

    step, p, state = make()
    with handling(number, too_long):
        with step:
            assert set(interrupted_everywhere(in_variables, Run(step, p, state), number, each=3)) == {TimeoutError}
            assert signal.getsignal(number) is not too_long
        assert signal.getsignal(number) is too_long


def test_a_handler_that_raises_nothing_runs_at_once_and_once():
    ran = []
    step, p, state = make()
    with handling(signal.SIGUSR1, lambda number, frame: ran.append(number)), step:
        found = interrupted_everywhere(in_variables, Run(step, p, state), signal.SIGUSR1, each=10)
    assert set(found) == {None}
    assert len(ran) == len(found)


def test_a_signal_while_a_handler_runs():
    """Two handlers raise, one after the other: the second may interrupt a `finally`, so the loop has none."""

    def both(number, frame):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise TimeoutError

    step, p, state = make()
    with handling(signal.SIGINT, signal.default_int_handler), handling(signal.SIGUSR1, both):
        run = Run(step, p, state)
        for at in range(1, 200, 5):
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):
                traced(in_attributes, run, at, signal.SIGUSR1)
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):
                wait()
            check_whole(run.p, run.state)
        step.close()


def test_the_handlers_are_the_users_again_once_the_step_is_closed():
    def own(number, frame):
        raise KeyboardInterrupt

    with handling(signal.SIGINT, own):
        with make()[0] as step:
            _, p, state = make()
            p, state, _ = step(p, state, ROWS)
            assert signal.getsignal(signal.SIGINT) is not own
        assert signal.getsignal(signal.SIGINT) is own
        with contextlib.suppress(ZeroDivisionError), make()[0] as step:
            p, state, _ = step(p, state, ROWS)
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGINT) is own


def test_steps_that_take_turns_wrap_a_handler_once():
    with handling(signal.SIGINT, signal.default_int_handler), make()[0] as one, make()[0] as other:
        _, p, state = make()
        for _ in range(3):
            p, state, _ = one(p, state, ROWS)
            p, state, _ = other(p, state, ROWS)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        other.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        check_whole(p, state)


def in_the_collector():
    def interrupt(phase, info):
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(interrupt)
    gc.collect()


def in_a_finalizer():
    class Thing:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Thing()


def in_a_weak_reference():
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert reference() is None


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("ignored", [in_the_collector, in_a_finalizer, in_a_weak_reference])
def test_an_interrupt_where_python_ignores_it_comes_a_moment_later(ignored, busy, monkeypatch):
    """JAX itself has a function that the garbage collector calls, at any moment of a loop.

    On a busy machine the first reminder comes while Python still deals with the error.
    """

    def late(*args, put_off=Interrupts.put_off):
        put_off(*args)
        time.sleep(0.05)

    if busy:
        monkeypatch.setattr(Interrupts, "put_off", late)
    step, p, state = make()
    with handling(signal.SIGINT, signal.default_int_handler), step:
        p, state, _ = step(p, state, ROWS)
        ignored()
        with pytest.raises(KeyboardInterrupt):
            wait()
    check_whole(p, state)


def test_a_signal_beside_the_one_that_reminds_is_not_taken_for_it(monkeypatch):
    def late(*args):
        time.sleep(0.2)
        kill(*args)

    kill, interrupts = signal.pthread_kill, Interrupts()
    monkeypatch.setattr(signal, "pthread_kill", late)
    with handling(signal.SIGINT, signal.default_int_handler), contextlib.ExitStack() as after:
        interrupts.begin(None)
        after.callback(interrupts.release)
        after.callback(wait)
        signal.raise_signal(signal.SIGINT)  # put off
        while not interrupts._reminded:
            time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt):
            interrupts.begin(None)
        interrupts.cancel()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_step_in_a_thread_leaves_handlers_alone():
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    step, p, state = make()
    found = []
    thread = threading.Thread(target=lambda: found.append(step(p, state, ROWS)))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    check_whole(*found[0][:2])


def test_a_step_keeps_nothing_of_its_caller_alive():
    class Thing:
        pass

    def call(step, p, state):
        thing = Thing()
        things.append(weakref.ref(thing))
        return step(p, state, ROWS)

    things = []
    step, p, state = make()
    p, state, _ = call(step, p, state)
    assert things[0]() is None


PROGRAM = """
import contextlib, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np, optax, jaxshard
from jaxshard.guards import Preemption, Watchdog
signal.signal(signal.SIGINT, signal.default_int_handler)
opt = jaxshard.zero2(optax.sgd(1e-3, momentum=0.9), jaxshard.make_mesh(), min_shard_size=8)
start = {"w": jnp.ones((64, 512)), "v": jnp.ones((512, 8))}
step = jaxshard.train_step(lambda p, b: jnp.mean((jnp.tanh(b @ p["w"]) @ p["v"] - 1) ** 2), opt, donate=True)
rows = np.ones((64, 64), "f")
p, state = opt.place(start), opt.init(start)
p, state, _ = step(p, state, rows)
came, n = 0, int(sys.argv[2])

def train(guard):  # a function, since Python 3.13 leaves the loop's jump backwards out of the `try` around it
    global p, state
    for i in range(100000):
        p, state, metrics = step(p, state, rows)
        if sys.argv[1] == "preemption" and guard.reached(i):
            guard._signal = None
            raise KeyboardInterrupt

guards = {"plain": contextlib.nullcontext, "watchdog": lambda: Watchdog(60), "preemption": Preemption}[sys.argv[1]]
with guards() as guard:
    while True:
        try:  # an interrupt may come as soon as a line is printed
            assert not any(x.is_deleted() for x in jax.tree.leaves((p, state)))
            print("alive" if came else "ready", flush=True)
            if came == n:
                break
            train(guard)
        except KeyboardInterrupt:
            came += 1
print("end", flush=True)
"""


def interrupt_again_and_again(guard, times):
    """Sends SIGINT at random moments to a loop of steps; how often its arrays were alive afterwards."""
    environment = fast_environment()
    command = [sys.executable, "-c", PROGRAM, guard, str(times)]
    chance = random.Random(0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"ready\n"
        alive = 0
        for _ in range(times):
            time.sleep(chance.uniform(0, 0.05))
            running.send_signal(signal.SIGINT)
            alive += running.stdout.readline() == b"alive\n"
        assert running.stdout.readline() == b"end\n", running.stderr.read().decode()
    assert running.returncode == 0
    return alive


@pytest.mark.parametrize("guard", ["plain", "watchdog", "preemption"])
def test_ctrl_c_in_a_loop(guard):
    assert interrupt_again_and_again(guard, 30) == 30


@pytest.mark.nightly
@pytest.mark.parametrize("guard", ["plain", "watchdog", "preemption"])
def test_ctrl_c_100_times_in_a_loop(guard):
    assert interrupt_again_and_again(guard, 100) == 100


CELL = """
came = False
try:
    for _ in range(100000):
        p, state, metrics = step(p, state, rows)
except KeyboardInterrupt:
    came = True
print("alive" if came and not any(x.is_deleted() for x in jax.tree.leaves((p, state))) else "lost")
"""


def test_the_stop_button_of_a_notebook():
    """Also without `try`: the next cell finds params and state as some step left them."""
    from jupyter_client.manager import start_new_kernel

    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(jaxshard.__file__).parents[1])}
    manager, kernel = start_new_kernel(kernel_name="python3", env=environment)
    try:
        setup, _, _ = PROGRAM.partition("came, n =")
        assert output_of(kernel, setup)[1] == ""
        chance = random.Random(0)
        for i in range(20):
            cell = CELL if i % 2 else "while True: p, state, metrics = step(p, state, rows)"
            request = kernel.execute(cell)
            time.sleep(chance.uniform(0.05, 0.2))
            manager.interrupt_kernel()
            text, error = read_all(kernel, request)
            assert (text, error) == (("alive\n", "") if i % 2 else ("", "KeyboardInterrupt"))
            assert output_of(kernel, "print(sum(x.is_deleted() for x in jax.tree.leaves((p, state))))") == ("0\n", "")
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


def output_of(kernel, cell):
    return read_all(kernel, kernel.execute(cell))


def read_all(kernel, request):
    """(what the cell printed, the name of its error)."""
    text, error = "", ""
    while True:
        message = kernel.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        text += content["text"] if message["msg_type"] == "stream" and content["name"] == "stdout" else ""
        error = content["ename"] if message["msg_type"] == "error" else error
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return text, error
