"""The programs of the fault tests' processes, one per function; `group.program` names them."""

import contextlib
import errno
import os
import pathlib
import resource
import shutil
import signal
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard
from jaxshard import guards
from jaxshard.apps.commands import train
from jaxshard.apps.records.record import Recorder
from jaxshard.checkpoint import Checkpointer
from jaxshard.checkpoint.storage import errors
from jaxshard.processes import agreement
from jaxshard.system import files

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def join() -> int:
    jaxshard.initialize(initialization_timeout=60, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=30)
    return jax.process_index()


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - params["b"]) ** 2)


def params(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(16, 24)).astype("f"), "b": rng.normal(size=24).astype("f")}


def optimizer(strategy="zero2"):
    return getattr(jaxshard, strategy)(TX, jaxshard.make_mesh(), min_shard_size=1)


def rows(step, opt, count=16):
    whole = np.random.default_rng(step).normal(size=(count, 16)).astype("f")
    each = count // jax.process_count()
    return jaxshard.shard_batch({"x": whole[jax.process_index() * each :][:each]}, opt)


def say(*words):
    print(*words, flush=True)


def saved_and_restored(folder):
    """Both processes save a state and restore it, with the same digests."""
    join()
    opt = optimizer()
    p = opt.place(params())
    state = opt.init(p)
    step = jaxshard.train_step(loss_fn, opt)
    p, state, _ = step(p, state, rows(0, opt))
    tree = {"params": p, "state": state, "step": 1, "key": jax.random.key(3)}
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, tree)
        found = checkpoints.restore(tree)[1]
        assert checkpoints.latest_valid() == 1
    assert found["step"] == 1
    for a, b in zip(
        jax.tree.leaves((tree["params"], tree["state"])),
        jax.tree.leaves((found["params"], found["state"])),
        strict=True,
    ):
        assert a.sharding == b.sharding
        for one, two in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(two.data).tobytes()
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    say("whole")


def other_saves(folder, what):
    """Processes that save different things all get an error, and nothing is written."""
    index = join()
    agreement.MEETING_SECONDS = 5
    tree = {"w": jnp.arange(4.0)}
    step = 1
    if what == "steps" and index:
        step = 2
    if what == "no step" and index:
        step = -9
    if what == "trees" and index:
        tree = {"v": jnp.arange(4.0)}
    with Checkpointer(folder) as checkpoints:
        if what == "one" and index:
            time.sleep(8)
            return
        try:
            checkpoints.save(step, tree)
        except Exception as error:
            say("refused:", type(error).__name__, error)
        if what != "one":
            say("then", checkpoints.latest_valid())  # they are still in step


def differing(what):
    """Processes whose program, params or rows differ all get an error before their first step."""
    index = join()
    rate = 1e-2 * (1 + index) if what == "learning rate" else 1e-2
    opt = jaxshard.zero2(optax.sgd(rate), jaxshard.make_mesh(), min_shard_size=1)
    whole = params(seed=index if what == "params" else 0)
    everywhere = jax.sharding.NamedSharding(opt.mesh, jax.P())
    p = {name: jax.make_array_from_callback(x.shape, everywhere, lambda i, x=x: x[i]) for name, x in whole.items()}
    batch = rows(0, opt)
    if what == "local batch":
        batch = {"x": np.zeros((8, 16), np.float32)}
    if what == "rows of one shard":
        opt = jaxshard.hybrid(optax.sgd(rate), jaxshard.make_mesh(pipeline=2))
        batch = jaxshard.shard_batch({"x": np.full((8, 16), index, np.float32)}, opt)
        p = opt.place(whole)
    try:
        if what == "placed params":
            p = opt.place(params(seed=index))
        step = jaxshard.train_step(loss_fn, opt)
        step(p, opt.init(p), batch)
    except Exception as error:
        say("refused:", type(error).__name__, error)


def first_step(what):
    """Prints the warnings of the first step."""
    index = join()
    mesh = jaxshard.make_mesh(pipeline=2, data=2) if what == "a pipeline's" else jaxshard.make_mesh()
    opt = jaxshard.zero2(TX, mesh, min_shard_size=1)
    seed = 0 if what == "the same" else index
    whole = np.random.default_rng(seed).normal(size=(8, 16)).astype("f")
    batch = {"x": whole * 0 if what == "all alike" else whole}
    if what == "a pipeline's":  # both processes hold all rows
        whole = np.random.default_rng(0).normal(size=(8, 16)).astype("f")
        rows = jax.NamedSharding(mesh, jax.P("data"))
        batch = {"x": jax.make_array_from_callback(whole.shape, rows, lambda part: whole[part])}
    else:
        batch = jaxshard.shard_batch(batch | {"mask": np.ones(8, "f")}, opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxshard.train_step(loss_fn, opt)(opt.place(params()), opt.init(params()), batch)
    same = [str(each.message) for each in caught if "identical rows" in str(each.message)]
    say("warned:", len(same), *same)
    agreement.take_leave(30)


def with_callbacks():
    """Prints in a step do not count as differences between processes."""
    join()
    opt = optimizer()

    def loss(p, batch):
        value = loss_fn(p, batch)
        jax.debug.callback(lambda x: None, value)
        return value

    p = opt.place(params())
    _, _, metrics = jaxshard.train_step(loss, opt)(p, opt.init(p), rows(0, opt))
    jax.block_until_ready(metrics)
    say("stepped")


def disk_full(folder, count, how):
    """A save fails midway: on the last process, by a limit on file size, or on all, by a disk that is smaller than it
    reports. All get an error, and the old step can be restored."""
    if int(count) > 1:
        join()
    opt = jaxshard.zero3(TX, jaxshard.make_mesh(), min_shard_size=1)
    p = opt.place(params())
    big = opt.place({"w": np.random.default_rng(0).normal(size=(512, 4096)).astype("f")})
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, p, blocking=True)
        usage = shutil.disk_usage(folder)._replace(free=10**12)
        shutil.disk_usage = lambda path: usage
        if how == "limit" and jax.process_index() == int(count) - 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        start = time.monotonic()
        try:
            checkpoints.save(2, big)
            checkpoints.wait()
        except OSError as error:
            say("refused:", error)
        say("seconds", time.monotonic() - start)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        say("restored", checkpoints.restore(p)[0])
    time.sleep(jax.process_index())  # the coordinator ends first


def unexpected_error():
    """An unexpected error on all processes; the coordinator ends first."""
    index = join()

    def fails(arguments):
        time.sleep(2 * index)
        raise RuntimeError(f"nobody thought of this in process {index}")

    train._command = fails
    raise SystemExit(train.command([]))


def notice_at_start(first):
    """SIGTERM to one process before its loop, which starts at a later step; then an endless loop."""
    index = join()
    if index:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    for loop in range(2):
        agreement.meet("loop")
        with guards.Preemption(say) as preemption:
            reached = [step for step in range(int(first), int(first) + 5) if preemption.reached(step)]
        say("loop", loop, "ends at", reached)
    agreement.meet("signal")
    if index:
        os.kill(os.getpid(), signal.SIGTERM)  # between loops JAX's own handler is active again
        time.sleep(1)
    say("not killed")


def record_fails(*arguments):
    """`jaxshard train`, where process 0 cannot write a record during a save."""
    if os.environ["JAX_PROCESS_ID"] == "0":
        write = Recorder.write

        def fails(self, step, scalars):
            if step == 9:
                raise OSError(errno.ENOSPC, "no space for records")
            write(self, step, scalars)

        Recorder.write = fails
        train.LEAVE_SECONDS = 3
    raise SystemExit(train.command(arguments))


def hang(seconds):
    """One process stops in Python, between two steps."""
    index = join()
    opt = optimizer()
    step = jaxshard.train_step(loss_fn, opt)
    p = opt.place(params())
    state = opt.init(p)
    with guards.Watchdog(float(seconds)) as watchdog, guards.Preemption(say):
        for i in range(1000):
            p, state, metrics = step(p, state, rows(i, opt))
            jax.block_until_ready(metrics)
            watchdog.beat()
            if i == 3:
                say("hangs" if index else "goes on")
                if index:
                    a_lock_that_nobody_opens()


def a_lock_that_nobody_opens():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def steps(heartbeat):
    """Endless steps."""
    jaxshard.initialize(heartbeat_timeout_seconds=int(heartbeat))
    opt = optimizer()
    step = jaxshard.train_step(loss_fn, opt)
    p = opt.place(params())
    state = opt.init(p)
    for i in range(10**6):
        p, state, metrics = step(p, state, rows(i, opt))
        jax.block_until_ready(metrics)
        say("step", i)


def numbers(step):
    """The arrays saved at a step: 8 MB."""
    rng = np.random.default_rng(step)
    return {"cut": rng.integers(0, 2**32, (1024, 1024), np.uint32), "copied": rng.normal(size=(512, 2048)).astype("f")}


def numbers_placed(step, mesh):
    specs = {"cut": jax.P("data"), "copied": jax.P()}
    return {
        name: jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, specs[name]), lambda index, x=x: x[index])
        for name, x in numbers(step).items()
    }


def saves(folder, count):
    """Endless saves, each started when the previous one is complete; continues after the newest."""
    if int(count) > 1:
        join()
    mesh = jaxshard.make_mesh()
    with Checkpointer(folder) as checkpoints:
        step = max(checkpoints.steps(), default=-1)
        agreement.meet("all know where to go on")
        while True:
            step += 1
            tree = {**numbers_placed(step, mesh), "step": step}
            say("begin", step)
            start = time.monotonic()
            checkpoints.save(step, tree, blocking=True)
            say("end", step, time.monotonic() - start)


def small_numbers(step, leaves=6):
    """The arrays of a step that is saved before the power cut."""
    rng = np.random.default_rng(step)
    return {f"w{leaf}": rng.normal(size=(64, 8 * (leaf + 1))).astype("f") for leaf in range(leaves)}


def small_numbers_placed(step, mesh):
    specs = [jax.P("data"), jax.P()]
    return {
        name: jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, specs[n % 2]), lambda index, x=x: x[index])
        for n, (name, x) in enumerate(small_numbers(step).items())
    }


def reported_saves(folder, count, keep_last, how):
    """Endless saves; prints each that is reported as saved. `how`: "blocking", or "async", after other work."""
    if int(count) > 1:
        join()
    mesh = jaxshard.make_mesh()
    with Checkpointer(folder, keep_last=int(keep_last)) as checkpoints:
        step = max(checkpoints.steps(), default=-1)
        agreement.meet("all know where to go on")
        while True:
            step += 1
            checkpoints.save(step, small_numbers_placed(step, mesh), blocking=how == "blocking")
            if how == "async":
                time.sleep(0.02 * (step % 4))
                checkpoints.wait()
            say("reported", step)


def synced_parts(folder):
    """Each process syncs the files that it wrote, since on a shared file system no other one can."""
    join()
    synced, sync = set(), files._sync

    def recorded(number):
        sync(number)
        synced.add(os.fstat(number).st_ino)

    files._sync = recorded
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, numbers_placed(1, jaxshard.make_mesh()), blocking=True)
        own = pathlib.Path(folder, "1", "state", f"ocdbt.process_{jax.process_index()}")
        names = [path.name for path in (own, *own.rglob("*")) if path.stat().st_ino not in synced]
        assert len(list(own.rglob("*"))) > 2
        say("not synced:", names)


def noise_saved_and_restored(strategy, saved, *others):
    """All processes save a state, and restore states that others saved; each checks its shards."""
    join()
    from test_checkpointer import noise, state_under, template_under  # makes arrays, which needs a joined JAX

    opt = getattr(jaxshard, strategy)(TX, jaxshard.make_mesh(), min_shard_size=1)
    with Checkpointer(saved) as checkpoints:
        checkpoints.save(1, state_under(opt, seed=1))
    for other in others:
        template = template_under(opt)
        _, found = Checkpointer(other).restore(template)
        for x, like, whole in zip(*map(jax.tree.leaves, (found, template, noise(seed=2))), strict=True):
            assert x.sharding == like.sharding
            assert x.dtype == whole.dtype
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(whole[shard.index]).tobytes()
        say("whole", other)


def train_without_rights(*arguments):
    """`jaxshard train` by root without capabilities, so that file permissions apply."""
    setpriv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-W", "ignore", "-m", "jaxshard"]
    os.execvp("setpriv", [*setpriv, "train", *arguments])


def interrupted_again_and_again():
    """A loop that goes on after each Ctrl-C. Every gradient is 1; each step subtracts exactly 1/1024 of its trace."""
    join()
    tx = optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda count: -1 / 1024))
    opt = jaxshard.zero2(tx, jaxshard.make_mesh(), min_shard_size=8)
    step = jaxshard.train_step(lambda p, batch: jnp.mean(batch) * jnp.sum(p["w"]), opt)
    p = opt.place({"w": np.ones((8, 16), "f")})
    state, batch = opt.init(p), jaxshard.shard_batch(np.ones((4, 4), "f"), opt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    came = -1
    while True:
        try:
            if came >= 0:
                say(f"whole {came}" if of_one_step(p, state) else "lost")
            for _ in range(100_000 if came >= 0 else 3):
                p, state, _ = step(p, state, batch)
            came = max(came, 0)
        except KeyboardInterrupt:
            came += 1


def of_one_step(p, state):
    """Whether params and state are live arrays of the same step, by the state's count."""
    if any(x.is_deleted() for x in jax.tree.leaves((p, state))):
        return False
    w, trace = 1.0, 0.0
    for _ in range(int(state[1].count)):
        trace = 1 + trace / 2
        w -= trace / 1024
    near = [(p["w"], w, 1e-3), (state[0].trace["w"], trace, 1e-6)]
    return all(np.all(np.abs(part.data - x) < by) for cut, x, by in near for part in cut.addressable_shards)


def one_cannot_read(folder, bad):
    """Both processes restore while `bad` alone has file system errors; then without errors both get the newest step."""
    me = join()
    errors._PAUSES = (0.01, 0.02, 0.03)
    mesh = jaxshard.make_mesh()
    tree = {"w": jnp.arange(4096.0), "cut": small_numbers_placed(0, mesh)["w0"], "n": 3}
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(10, tree)
        checkpoints.save(20, tree, blocking=True)
        checkpoints.verify(20)  # so that everything that is opened once is open
        step = pathlib.Path(folder) / "20"
        files = [path for path in step.rglob("*") if path.is_file()]
        arrays = max(files, key=lambda path: path.stat().st_size)
        agreement.meet("all have seen the files as they are")
        for place in (step / "_CHECKPOINT_METADATA", step / "state/manifest.ocdbt", arrays):
            for broken in (disk_broken, rights_lost, too_many_files):
                say("case", broken.__name__, place.name)
                calls = (lambda: checkpoints.restore(tree), lambda: checkpoints.restore(tree, 20))
                with broken(place, me == int(bad)), warnings.catch_warnings():
                    warnings.simplefilter("error")
                    agreement.meet("the error is there")
                    for call in calls:
                        try:
                            say("restored", call()[0])
                        except OSError as error:
                            say("refused", type(error).__name__, errno.errorcode[error.errno])
                    agreement.meet("all have tried")
                agreement.meet("the error is gone")
                say("then", checkpoints.restore(tree)[0])
        checkpoints.save(20, tree, blocking=True)
    say("steps", *sorted(path.name for path in pathlib.Path(folder).iterdir() if path.is_dir()))


@contextlib.contextmanager
def disk_broken(path, here):
    """Reads of the file fail by EIO in this process only: a link leads each process to a file that it has open."""
    away, number = path.with_name(f"{path.name}.away"), 200
    if jax.process_index() == 0:
        path.rename(away)
        path.symlink_to(f"/proc/self/fd/{number}")
    agreement.meet("the link is there")
    opened = os.open("/proc/self/mem" if here else away, os.O_RDONLY)
    os.dup2(opened, number)
    try:
        yield
    finally:
        os.close(number)
        os.close(opened)
        if jax.process_index() == 0:
            path.unlink()
            away.rename(path)


@contextlib.contextmanager
def rights_lost(path, here):
    """This process may not read the file; if the test does not run as root, no process may."""
    mode = path.stat().st_mode
    agreement.meet("all know its mode")
    path.chmod(0)
    if here and os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        path.chmod(mode)


@contextlib.contextmanager
def too_many_files(path, here):
    """This process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd"))) + 1
    holes = list[int]()
    try:
        while here and (not holes or holes[-1] < highest):
            holes.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest if here else soft, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in holes:
            os.close(number)


# Meshes of some devices.


def trains_on_its_own_mesh(folder: str, processes: str) -> None:
    """Groups of processes each train their own model, for their own number of steps, save and restore."""
    index, size = join(), int(processes)
    group = index // size
    own = [d for d in jax.devices() if d.process_index // size == group]
    mesh, width, steps = jaxshard.make_mesh(devices=own), 8 * (group + 1), 3 + 4 * group
    rng = np.random.default_rng(group)
    params = {"w": rng.normal(size=(width, 24)).astype("f"), "b": np.zeros(24, "f")}
    rows = rng.normal(size=(steps, 24, width)).astype("f")
    plain, expected = (params, TX.init(params)), []
    for x in rows:
        value, grads = jax.value_and_grad(loss_fn)(plain[0], {"x": x})
        updates, state = TX.update(grads, plain[1], plain[0])
        plain, expected = (optax.apply_updates(plain[0], updates), state), [*expected, float(value)]
    opt = jaxshard.zero3(TX, mesh, min_shard_size=1)
    step = jaxshard.train_step(loss_fn, opt)
    p, s = opt.place(params), opt.init(params)
    place = index - group * size  # within the group
    losses = []
    with jaxshard.processes.among(mesh), Checkpointer(f"{folder}/{group}") as checkpoints:
        for i, x in enumerate(rows):
            mine = x[place * 24 // size : (place + 1) * 24 // size]
            p, s, metrics = step(p, s, jaxshard.shard_batch({"x": mine}, opt))
            losses.append(float(metrics["loss"]))
            if size > 1:
                checkpoints.save(i, {"p": p, "s": s})
        if size > 1:
            checkpoints.wait()
            number, found = checkpoints.restore({"p": p, "s": s})
            assert number == steps - 1
            same = jax.jit(
                lambda a, b: jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x, y: jnp.all(x == y), a, b))
            )
            assert bool(same(found, {"p": p, "s": s}))
        else:
            try:
                checkpoints.save(0, {"p": p, "s": s})
            except ValueError as error:
                print("refused:", error, flush=True)
        assert jaxshard.processes.gathered("who", str(index)) == [str(group * size + i) for i in range(size)]
        assert jaxshard.processes.from_first("first", lambda: index) == group * size
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert opt.rank == place * jax.local_device_count()
    print("trained", group, steps, flush=True)
    others = jaxshard.make_mesh(devices=[d for d in jax.devices() if d not in own])
    for call in (lambda o: o.place(params), lambda o: o.rank):
        try:
            call(jaxshard.zero3(TX, others))
        except ValueError as error:
            print("refused:", error, flush=True)


def trains_otherwise_than_the_rest_of_its_mesh() -> None:
    """Of two meshes of two processes, the second one's have other learning rates."""
    index = join()
    own = [d for d in jax.devices() if d.process_index // 2 == index // 2]
    opt = jaxshard.zero2(optax.sgd(0.1 + index // 3), jaxshard.make_mesh(devices=own), min_shard_size=1)
    params = {"w": np.ones((8, 24), "f"), "b": np.zeros(24, "f")}
    step = jaxshard.train_step(loss_fn, opt)
    try:
        step(params, opt.init(params), jaxshard.shard_batch({"x": np.ones((8, 8), "f") * index}, opt))
        print("trained", flush=True)
    except jaxshard.processes.ProcessError as error:
        print("refused:", error, flush=True)
