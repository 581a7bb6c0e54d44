"""Every optimizer of optax, through every strategy, on two meshes: params and state equal those of one device.

What every push runs is one mesh in double precision, and the bits of the element-wise ones; `-m nightly` runs the whole
matrix, both precisions, and writes its table to docs/matrix.md. `matrix.cases()` is the list of optimizers.
"""

import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning")

CASES = matrix.cases()
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "host", "hybrid"]
MESHES = {"8 data": {}, "4 data x 2 tensor": {"tensor": 2}}
THREE = "2 pipeline x 2 data x 2 tensor"
WHERES = [(s, mesh) for s in STRATEGIES[:-1] for mesh in MESHES] + [("hybrid", THREE)]
LOSSES = {"8 data": matrix.loss, "4 data x 2 tensor": matrix.tensor_loss, THREE: matrix.hybrid_loss}
STEPS, ORDERS, MANY_ORDERS, NUM_GROUPS = 5, 64, 1024, 20
GROUPS = [sorted(CASES)[i::NUM_GROUPS] for i in range(NUM_GROUPS)]  # several optimizers in one compilation

QUICKLY = {"xla_backend_optimization_level": 0}  # how hard LLVM tries is no matter here, and takes half the time


def sharded(case, strategy, mesh):
    if strategy == "hybrid":
        mesh = jaxshard.make_mesh(pipeline=2, tensor=2)
        return jaxshard.hybrid(case.make(), mesh, matrix.HYBRID_SPECS, zero=3, min_shard_size=1)
    sizes = MESHES[mesh] | ({"replica": 2} if strategy in ("hsdp", "hfsdp") else {})
    options = {"specs": matrix.SPECS} if "tensor" in sizes else {}
    options |= {"state_axes": ("data", "replica")} if strategy == "hfsdp" else {}
    options |= {"state_memory": "host"} if strategy == "host" and has_arrays(case) else {}
    strategy = {"hfsdp": "hsdp", "host": "zero3"}.get(strategy, strategy)
    return getattr(jaxshard, strategy)(case.make(), jaxshard.make_mesh(**sizes), min_shard_size=1, **options)


def has_arrays(case):
    """Whether the state has anything that could lie on the host."""
    state = jax.eval_shape(case.make().init, case.tree(matrix.params(np.float32)))
    return any(leaf.size > 1 for leaf in jax.tree.leaves(state))


def on_the_mesh(names, strategy, mesh, dtype, **options):
    """name -> what the steps made of it: params, state, the losses."""
    opts = {name: sharded(CASES[name], strategy, mesh) for name in names}

    def extra(name):
        return lambda params, batch: CASES[name].extra(matrix.loss, params, batch)

    step = {name: jaxshard.train_step(LOSSES[mesh], opts[name], extra=extra(name), **options) for name in names}

    def start(trees):
        return {name: (opts[name].place(tree), opts[name].init(tree)) for name, tree in trees.items()}

    def advance(at, batch):
        new = {name: step[name](*at[name], batch) for name in names}
        return {name: out[:2] for name, out in new.items()}, {name: out[2]["loss"] for name, out in new.items()}

    start = start if strategy == "host" else jax.jit(start)  # what a jit returns lies on devices
    at = start(trees(names, matrix.params(dtype)))
    return _run(jax.jit(advance, compiler_options=QUICKLY), at, matrix.batches(STEPS, dtype))


def trees(names, params):
    return {name: CASES[name].tree(params) for name in names}


def _run(advance, at, batches):
    losses = []
    for batch in batches:
        at, loss = advance(at, batch)
        losses.append(loss)
    found = {name: {"params": p, "state": s, "losses": [loss[name] for loss in losses]} for name, (p, s) in at.items()}
    return jax.device_get(jax.tree.map(_plain, found))


def _plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def on_one_device(names, dtype, orders=((slice(None), None),)):
    """The same by plain optax, jitted, in each of these orders of the rows and (by a seed) of the leaves' elements."""
    txs = {name: matrix.plain(CASES[name]) for name in names}

    @jax.jit
    def start(trees):
        return {name: (tree, txs[name].init(tree)) for name, tree in trees.items()}

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def advance(at, batch):
        new, losses = {}, {}
        for name, (params, state) in at.items():
            losses[name], grads = jax.value_and_grad(matrix.loss)(params, batch)
            more = CASES[name].extra(matrix.loss, params, batch)
            updates, state = txs[name].update(grads, state, params, value=losses[name], grad=grads, **more)
            new[name] = optax.apply_updates(params, updates), state
        return new, losses

    tasks = [matrix.reordered(matrix.params(dtype), matrix.batches(STEPS, dtype), *order) for order in orders]
    return [_run(advance, start(trees(names, params)), batches) for params, batches in tasks]


# The comparison.


def distance(a, b):
    """|a - b| / |b| of one leaf; whole numbers, booleans and keys must be equal."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def distances(got, want):
    """Path -> distance, over results that must have the same structure, shapes and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    return dict(zip(paths, map(distance, jax.tree.leaves(got), jax.tree.leaves(want)), strict=True))


STILL = {"set_to_zero"}


@functools.lru_cache(maxsize=1)
def allowed(names, dtype, num_orders=ORDERS):
    """name -> (what one device makes of it, how far from that each leaf may be).

    In single precision that is twice the control: the furthest that other orders take one device, of the batch's rows,
    and of the rows and the leaves' elements (norms sum over these, and so do the shards' parts).
    """
    if dtype == np.float64:
        (want,) = on_one_device(names, dtype)
        _check_that_they_move(names, want)
        return {name: (want[name], dict.fromkeys(distances(want[name], want[name]), 1e-12)) for name in names}
    rows = [np.random.default_rng(seed).permutation(matrix.ROWS) for seed in range(num_orders)]
    orders = [(slice(None), None), *((row, None) for row in rows), *((row, seed) for seed, row in enumerate(rows))]
    want, *others = on_one_device(names, dtype, orders)
    return {
        name: (want[name], _twice_the_control(name, want[name], [other[name] for other in others], num_orders))
        for name in names
    }


def _twice_the_control(name, want, others, num_orders):
    """Where elements were shuffled, sorted ones are compared: the smallest distance that any pairing of them has."""
    found = [distances(other, want) for other in others[:num_orders]]
    if name not in matrix.BY_PLACE:
        found += [distances(*(jax.tree.map(_sorted, x) for x in (other, want))) for other in others[num_orders:]]
    allowed = {path: max(2 * max(far[path] for far in found), float(np.finfo(np.float32).eps)) for path in found[0]}
    assert max(allowed.values()) < 1e-3, f"{name}: rounding alone makes another result, so this would show nothing"
    return allowed


def _sorted(x):
    return np.sort(x, axis=None)


def _check_that_they_move(names, want):
    """Else the params would be compared with themselves."""
    for name in set(names) - STILL:
        start = jax.tree.leaves(CASES[name].tree(matrix.params(np.float64)))
        assert max(map(distance, jax.tree.leaves(want[name]["params"]), start)) > 1e-4, name


def cells(names, strategy, mesh, dtype, num_orders=ORDERS):
    """name -> (the leaf that is furthest off for what it may be, its distance, what it may be)."""
    with jax.enable_x64(dtype == np.float64):
        want = allowed(tuple(names), dtype, num_orders)
        got = on_the_mesh(names, strategy, mesh, dtype)
        found = {}
        for name in names:
            far, limit = distances(got[name], want[name][0]), want[name][1]
            worst = max(far, key=lambda path: _over(far[path], limit[path]))
            found[name] = worst, far[worst], limit[worst]
        return found


def _over(far, limit):
    return far / limit if np.isfinite(limit) else 0.0


def wrong(found):
    return {name: cell for name, cell in found.items() if not cell[1] <= cell[2]}


# Element-wise optimizers: the same bits, given the same gradients.


@functools.cache
def is_elementwise(name):
    """Whether jaxshard lets it run on shards, inside a user's own `shard_map`; it says why where it does not."""
    if name in matrix.EXTRA:  # they ask for a loss over whole params, or for gradients of their own
        return False
    opt, tree = sharded(CASES[name], "zero2", "8 data"), CASES[name].tree(matrix.params(np.float32))
    found = opt.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree))
    specs = opt.shardings(tree).specs.state

    def local(params, state):
        grads = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        return opt.update(grads, state, params, value=1.0)

    try:
        jax.eval_shape(jax.shard_map(local, mesh=opt.mesh, in_specs=(P(), specs), out_specs=(P(), specs)), tree, found)
    except ValueError as error:
        if "the inner optimizer is not element-wise" not in str(error):
            raise
        return False
    return True


def given_gradients(names, txs, opts=None):
    """name -> [(updates, params, state) after each step]; the params are added to by a program of its own."""

    @jax.jit
    def begin(trees):
        return {name: (opts[name].place(p) if opts else p, txs[name].init(p)) for name, p in trees.items()}

    @jax.jit
    def update(grads, at):
        return {name: txs[name].update(grads[name], at[name][1], at[name][0], value=jnp.float32(1)) for name in names}

    @jax.jit
    def add(at, new):
        return {name: (optax.apply_updates(at[name][0], new[name][0]), new[name][1]) for name in names}

    start, history = trees(names, matrix.params(np.float32)), {name: [] for name in names}
    at = begin(start)
    for i in range(STEPS):
        grads = jax.tree.map(lambda x, i=i: np.cos(i + 9 * x, dtype=np.float32), start)
        new = update(grads, at)
        at = add(at, new)
        for name in names:
            history[name].append({"updates": new[name][0], "params": at[name][0], "state": new[name][1]})
    return jax.device_get(history)


def other_bits(names, strategy, mesh):
    """name -> the leaves of updates, params and state, after any step, that differ in a bit from one device's."""
    opts = {name: sharded(CASES[name], strategy, mesh) for name in names}
    got, want = given_gradients(names, opts, opts), _plain_given_gradients(tuple(names))
    return {name: leaves for name in names if (leaves := _other_leaves(got[name], want[name]))}


@functools.lru_cache(maxsize=1)
def _plain_given_gradients(names):
    return given_gradients(names, {name: matrix.plain(CASES[name]) for name in names})


def _other_leaves(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if a.dtype != b.dtype or a.tobytes() != b.tobytes()]


def other_bits_without_fma(names, wheres):
    """[(strategy, mesh, name)] of those that differ on processors that cannot make one rounding of a * b + c.

    In a process of its own, compiling for these: LLVM makes one rounding of the two wherever both are in one fusion,
    and sharding changes what is fused.
    """
    code = (
        "import conftest, json, sys, test_matrix as t; names, wheres = json.load(sys.stdin); "
        "print(json.dumps([(*where, name) for where in wheres for name in t.other_bits(names, *where)]))"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(jaxshard.__file__).parent.parent)]
    env = os.environ | {"XLA_FLAGS": "--xla_cpu_max_isa=AVX", "PYTHONPATH": os.pathsep.join(paths)}
    env["JAXSHARD_TESTS"] = "as-users-compile"
    asked = json.dumps([names, wheres])
    done = subprocess.run([sys.executable, "-c", code], input=asked, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(map(tuple, json.loads(done.stdout.splitlines()[-1])))


# What every push runs.


def test_every_callable_of_optax_is_in_the_list():
    """A new optimizer is tested the day it appears, or this says what is missing to build it."""
    public = matrix.public()
    classes = {name for name, value in public.items() if inspect.isclass(value) and hasattr(value, "update")}
    assert classes == matrix.CLASSES
    assert set(public) >= matrix.OTHERS
    assert len(matrix.factories()) > 120
    for case in CASES.values():
        tx = case.make()
        assert callable(tx.init)
        assert callable(tx.update)


def test_an_unknown_argument_is_named():
    def new(learning_rate, wobble) -> optax.GradientTransformation:
        return optax.sgd(learning_rate * wobble)

    with pytest.raises(LookupError, match=r"optax\.new: add its argument 'wobble' to ARGUMENTS"):
        matrix.arguments("new", new)


@pytest.mark.parametrize("name", sorted(matrix.WITHOUT))
def test_what_is_left_out_is_what_optax_itself_cannot_hold(name):
    tx, whole = CASES[name].make(), jax.tree.map(jnp.asarray, matrix.params(np.float32))

    def step(at, _):
        params, state = at
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), None

    def two_steps(params):
        return jax.lax.scan(step, (params, tx.init(params)), length=2)

    for leaf, (error, message) in CASES[name].without.items():
        params = {key: value for key, value in whole.items() if key == leaf or key not in CASES[name].without}
        with pytest.raises(error, match=message):
            two_steps(params)


def test_the_state_of_monitor_changes_its_structure():
    """Why it is `settled` in the matrix."""
    tx, params = optax.monitor({"norm": optax.tree.norm}), {"w": jnp.ones(3)}
    start = tx.init(params)
    with pytest.raises(TypeError, match="structure"):
        jax.lax.scan(lambda state, _: (tx.update(params, state)[1], None), start, length=2)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_every_optimizer(group):
    found = {
        strategy: cells(GROUPS[group], strategy, "8 data", np.float64)
        for strategy in ("zero2", "zero3", "hfsdp", "host")
    }
    assert not {strategy: bad for strategy, cells in found.items() if (bad := wrong(cells))}


@pytest.mark.parametrize("part", range(4))
def test_element_wise_optimizers_have_the_same_bits(part):
    names = sorted(CASES)[part::4]
    assert sum(map(is_elementwise, names)) > 10
    wheres = [("zero2", "8 data"), ("zero3", "8 data")]
    assert other_bits_without_fma(list(filter(is_elementwise, names)), wheres) == []


NAN_WRAPPERS = ["apply_if_finite", "MultiSteps, skip_not_finite", "apply_if_finite of MultiSteps"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_row_that_is_not_finite_on_one_device(strategy, monkeypatch):
    """The wrappers that look for it see it on all; `max_skips=None` leaves such steps to them."""
    batches = matrix.batches(STEPS, np.float64)
    batches[1]["x"][13] = np.nan
    monkeypatch.setattr(matrix, "batches", lambda count, dtype: batches)
    with jax.enable_x64(True):
        (want,) = on_one_device(NAN_WRAPPERS, np.float64)
        got = on_the_mesh(NAN_WRAPPERS, strategy, "8 data", np.float64, max_skips=None)
    for name in NAN_WRAPPERS:
        losses = got[name].pop("losses"), want[name].pop("losses")
        assert [np.isnan(found).tolist() for found in losses] == [[False, True, False, False, False]] * 2
        assert max(distances(got[name], want[name]).values()) < 1e-12


ACROSS = ["clip_by_block_rms", "clip_by_global_norm", "fromage", "lamb"]


def test_an_update_that_runs_per_shard_is_seen(monkeypatch):
    """The bug that all this is about, planted: each device looks at its own part alone."""
    right = sharded

    def planted(case, strategy, mesh):
        opt = right(case, strategy, mesh)
        return jaxshard.zero2(per_shard(opt.inner, opt.mesh), opt.mesh, min_shard_size=1)

    monkeypatch.setitem(globals(), "sharded", planted)
    found = cells(["adam", *ACROSS], "zero2", "8 data", np.float64)
    assert sorted(wrong(found)) == ACROSS
    assert min(found[name][1] for name in ACROSS) > 1e-6


def per_shard(tx, mesh):
    def spec(x):
        return P(*[None] * (x.ndim - 1), "data") if x.ndim and x.shape[-1] % 8 == 0 else P()

    def update(updates, state, params=None):
        at = jax.tree.map(spec, (updates, state, params))
        run = jax.shard_map(tx.update, mesh=mesh, in_specs=at, out_specs=at[:2], check_vma=False)
        return run(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def test_the_table_lists_every_optimizer():
    """`-m nightly` writes it; the names in its first column are those of today's list."""
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows[2:]] == sorted(CASES)


# The whole matrix, and its table.

TABLE = Path(__file__).parents[2] / "docs" / "matrix.md"
WORDS = """# Exactness of every optimizer

Every gradient transformation of optax {optax} trains {steps} steps under every strategy, with different examples on
each device. The table compares params, state and losses with jitted optax on one device. A leaf's distance is
`|a - b| / |b|`. This command writes the page (here with jax {jax}):

```sh
make nightly ARGS="-k test_the_whole_matrix"
```

* **Meshes:** 8 data; 4 data x 2 tensor, with some leaves sharded over tensor; for `hybrid` with ZeRO-3, 2 pipeline x 2
  data x 2 tensor, with some leaves sharded over one model axis and some over both.
* **Strategies:** `hsdp` has 2 replicas; hfsdp is `hsdp` with its state sharded over the replicas too; host is `zero3`
  with its state in the host's memory.
* **A strategy's column:** the largest distance of any leaf in float64, on any mesh. The bound is 1e-12.
* **float32:** the largest float32 distance over strategies and meshes, divided by a control. The control is the largest
  distance that reordering causes on one device: {orders} orders of the batch's examples, and {orders} of the examples
  and the leaves' elements ({many} where {orders} are too few). The bound is 2, or one rounding (1.2e-7).
* **bits:** for element-wise transformations, given equal gradients. "equal": bit-identical on every strategy and mesh,
  also as `zero2` and `zero3` compile the step on 8 devices. "equal, no FMA": bit-identical only without fused
  multiply-add, because sharding changes which operations XLA fuses, and with FMA a * b + c is rounded once if fused.

A bare transformation runs in a chain with `scale`. Adapters run `monitor` and the two differential privacy
transformations. optax itself fails on these leaves, which are left out:

{left_out}
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_the_whole_matrix(group, precision, tmp_path_factory):
    names, dtype = GROUPS[group], np.dtype(precision).type
    found = {where: cells(names, *where, dtype) for where in WHERES}
    for where in found if precision == "float32" else ():
        for name in wrong(found[where]):  # one number may stand still in 64 orders, and move in the 65th
            found[where] |= cells((name,), *where, dtype, MANY_ORDERS)
    bad = {where: bad for where, cells in found.items() if (bad := wrong(cells))}
    columns = {name: _columns(name, found, precision) for name in names}
    if precision == "float32":
        even = list(filter(is_elementwise, names))
        different = other_bits_without_fma(even, list(found))
        bad |= {("bits", strategy, mesh): name for strategy, mesh, name in different}
        as_compiled = {name for s in ("zero2", "zero3") for name in other_bits(even, s, "8 data")}
        for name in even:
            equal = "equal, no FMA" if name in as_compiled else "equal"
            columns[name]["bits"] = "DIFFERENT" if name in {name for *_, name in different} else equal
    _write(columns, f"{precision}-{group}", tmp_path_factory)
    assert not bad


def _columns(name, found, precision):
    if precision == "float32":
        return {"float32": f"{max(2 * _over(*cells[name][1:]) for cells in found.values()):.2f}"}
    worst = {s: max(cells[name][1] for where, cells in found.items() if where[0] == s) for s in STRATEGIES}
    return {s: f"{far:.0e}" if far else "0" for s, far in worst.items()}


def _write(columns, part, tmp_path_factory):
    """Keeps this part beside the other processes' parts; the last one writes the table."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "matrix"
    shared.mkdir(exist_ok=True)
    (shared / f"{part}.new").write_text(json.dumps(columns))
    (shared / f"{part}.new").rename(shared / f"{part}.json")
    parts = [json.loads(path.read_text()) for path in shared.glob("*.json")]
    if len(parts) == 2 * NUM_GROUPS:
        whole = {name: {} for name in sorted(CASES)}
        for name, some in (item for part in parts for item in part.items()):
            whole[name] |= some
        TABLE.write_text(table(whole))


def table(whole):
    heads = [*STRATEGIES, "float32", "bits"]
    rows = [["", *heads], ["---"] * (len(heads) + 1)]
    rows += [[name, *(columns.get(head, "") for head in heads)] for name, columns in whole.items()]
    left_out = [
        f"* `{name}`, leaf {leaf!r}: {error.__name__}, {message!r}."
        for name, case in sorted(CASES.items())
        for leaf, (error, message) in case.without.items()
    ]
    versions = {"optax": optax.__version__, "jax": jax.__version__}
    words = WORDS.format(**versions, steps=STEPS, orders=ORDERS, many=MANY_ORDERS, left_out="\n".join(left_out))
    return words + "\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
