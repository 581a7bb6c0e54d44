"""Lookups of rows in cut tables equal plain indexing on one device, in whatever way a loss asks for them.

Each hazard has a table of its own in one loss, so that one step tries all, and what differs is named after its hazard.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import assert_close, distances, one_device, sharded

import jaxshard
from jaxshard import tensor
from jaxshard.loss.params import lookup

pytestmark = [pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning"), pytest.mark.usefixtures("x64")]

ROWS, LENGTH, VOCABULARY, WIDTH = 48, 2, 250, 24
find, unshard = jaxshard.lookup, jaxshard.unshard


def sgd():
    """Made anew for each optimizer: layouts are cached by it."""
    return optax.sgd(0.1, momentum=0.9)


def opt_of(strategy, n=4, mesh=None, **options):
    mesh = mesh or jaxshard.make_mesh(devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(sgd(), mesh, min_shard_size=1, **options)


def batches(count=2):
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    return [{"ids": rng.integers(0, VOCABULARY, shape), "y": rng.normal(size=(*shape, WIDTH))} for _ in range(count)]


# Hazards. Each takes a table and ids, and makes features of (rows, ..., WIDTH).


def tied(t, rows):
    return rows + jnp.tanh(rows @ t.T) @ t / 10


def head_first(t, ids):
    head = jnp.tanh(t) * 2
    return tied(t, t[ids]) + head.mean(0)


def in_scan(rows_of):
    def features(t, ids):
        start = jnp.zeros((ids.shape[0], WIDTH))
        return lax.scan(lambda x, column: (jnp.tanh(x + rows_of(t, column)), None), start, ids.T)[0][:, None]

    return features


def in_while(t, ids):
    start = jnp.zeros((ids.shape[0], WIDTH))
    return lax.fori_loop(0, 2, lambda i, x: jnp.sin(x + find(t, (ids[:, 0] + i) % VOCABULARY)), start)[:, None]


def in_branches(t, ids):
    return lax.cond(t[0, 0] > 0, lambda: find(t, ids), lambda: -t[ids])


def in_remat(rows_of, **how):
    layer = jax.checkpoint(lambda t, ids: jnp.tanh(rows_of(t, ids)), **how)
    return lambda t, ids: layer(t, ids) + layer(t, (ids + 1) % VOCABULARY)


def penalized(t, ids):
    rows = t[ids]
    return rows * (1 + jnp.mean(t**2))


def by_tangents(t, ids):
    return find(t, ids) * jax.jvp(lambda t: jnp.sin(t[ids]), (t,), (jnp.ones_like(t),))[1]


def by_gradient(t, ids):
    rows = t[ids]
    return rows + jax.grad(lambda x: jnp.sum(jnp.sin(x)))(rows)


def plain(t, ids):
    return t[ids]


EXCHANGED = {
    "plain": plain,
    "asked": find,
    "unsharded": lambda t, ids: unshard(t)[ids],
    "both": lambda t, ids: find(unshard(t), ids),
    "taken": lambda t, ids: jnp.take(t, ids, axis=0),
    "negative": lambda t, ids: t[ids - VOCABULARY],
    "filled": lambda t, ids: t.at[2 * ids].get(mode="fill", fill_value=0.25),
    "clipped": lambda t, ids: jnp.take(t, 2 * ids - 100, axis=0, mode="clip"),
    "beyond": lambda t, ids: t[2 * ids - 100],
    "promised, beyond": lambda t, ids: t.at[2 * ids].get(mode="promise_in_bounds"),
    "promised": lambda t, ids: t.at[ids].get(mode="promise_in_bounds"),
    "of rows": lambda t, ids: find(t, ids[:, 0])[:, None],
    "of four dims": lambda t, ids: find(t, jnp.stack([ids, ids[:, ::-1]], 1)[:, :, None]).sum((1, 2)),
    "of bytes": lambda t, ids: find(t, ids.astype(jnp.uint8)),
    "of constants": lambda t, ids: find(t, np.array([0, 2, 2]))[None, :2] + find(t, jnp.arange(2)),
    "twice": lambda t, ids: t[ids] + 2 * find(t, ids[:, ::-1]),
    "narrow": lambda t, ids: find(t.astype(jnp.float32), ids).astype(jnp.float64),
    "frozen": lambda t, ids: find(t, ids) * lax.stop_gradient(t[ids]),
    "in a scan, asked": in_scan(find),
    "in a remat": in_remat(plain),
    "in a remat, unsharded": in_remat(lambda t, ids: unshard(t)[ids]),
    "in a remat with a policy": in_remat(find, policy=jax.checkpoint_policies.dots_saveable),
    "in a jit": jax.jit(lambda t, ids: t.astype(jnp.float32)[ids].astype(jnp.float64)),
    "twice differentiated": by_gradient,
    "by tangents": by_tangents,
    "under vmap": lambda t, ids: jax.vmap(jax.vmap(lambda i: t[i]))(ids),
    "under vmap, asked": lambda t, ids: jax.vmap(jax.vmap(lambda i: find(t, i)))(ids - VOCABULARY // 2),
    "under vmap, by a slice": lambda t, ids: jax.vmap(jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 1)[0]))(ids),
    "of no weight": lambda t, ids: jnp.zeros((1, 1, WIDTH)) * find(t, ids),
}
GATHERED = {
    "tied": lambda t, ids: tied(t, t[ids]),
    "tied, unsharded": lambda t, ids: tied(unshard(t), unshard(t)[ids]),
    "tied, unsharded once": lambda t, ids: (lambda t: tied(t, t[ids]))(unshard(t)),
    "tied, asked": lambda t, ids: tied(t, find(t, ids)),
    "tied, head first": head_first,
    "one row": lambda t, ids: find(t, jnp.argmax(jnp.arange(7))) + t[5] + jnp.zeros(ids.shape)[..., None],
    "penalized": penalized,
    "scaled": lambda t, ids: find(2 * t, ids),
    "reshaped": lambda t, ids: t.reshape(-1, 2, WIDTH)[ids % (VOCABULARY // 2)].sum(-2),
    "another dim": lambda t, ids: jnp.take(t, ids % WIDTH, axis=1).mean(0)[..., None] * jnp.ones(WIDTH),
    "some features": lambda t, ids: (t[ids, :1] + t[ids, ids % WIDTH][..., None]) * jnp.ones(WIDTH),
    "in a scan": in_scan(plain),
    "in a while loop": in_while,
    "in branches": in_branches,
}


def tables(hazards):
    rng = np.random.default_rng(1)
    params = {name: rng.normal(size=(VOCABULARY, WIDTH)) for name in hazards}
    return params | {"mixer": rng.normal(size=(WIDTH, WIDTH)) / 5}


def loss_of(hazards):
    def loss(params, batch):
        return sum(
            jnp.mean(jnp.square(hazard(params[name], batch["ids"]) @ params["mixer"] - batch["y"]))
            for name, hazard in hazards.items()
        )

    return loss


EXCHANGES, GATHERS = loss_of(EXCHANGED), loss_of(GATHERED)
TABLES = {EXCHANGES: tables(EXCHANGED), GATHERS: tables(GATHERED)}


@pytest.fixture(scope="module", params=[EXCHANGES, GATHERS], ids=["exchanged", "gathered"])
def case(request):
    """(loss, tables, what one device makes of them)"""
    loss, params = request.param, TABLES[request.param]
    with jax.enable_x64(True):
        return loss, params, one_device(loss, sgd(), params, batches())


@pytest.mark.parametrize(
    ("strategy", "n", "microbatches"), [("zero2", 4, 1), ("zero3", 4, 1), ("zero3", 3, 2), ("zero2", 8, 3)]
)
def test_all_hazards_equal_one_device(case, strategy, n, microbatches):
    loss, params, want = case
    got = sharded(loss, opt_of(strategy, n), params, batches(), microbatches=microbatches)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-6 if loss is EXCHANGES else 1e-12)  # some tables are cast first
    if loss is EXCHANGES:
        wide = [
            {k: v for k, v in tree.items() if k not in ("narrow", "in a jit", "mixer")} for tree in (got[0], want[0])
        ]
        assert_close(*wide, 1e-12)


@pytest.fixture
def by_rows(monkeypatch):
    """Tables whose rows are cut: 4 and 8 devices do not divide their features."""
    monkeypatch.setitem(globals(), "VOCABULARY", 248)
    monkeypatch.setitem(globals(), "WIDTH", 21)


@pytest.mark.parametrize(
    ("strategy", "n", "microbatches", "view"),
    [("zero2", 4, 1, "local"), ("zero3", 4, 1, "local"), ("zero3", 8, 3, "local"), ("zero3", 4, 2, "global")],
)
@pytest.mark.parametrize("hazards", [EXCHANGED, GATHERED], ids=["exchanged", "gathered"])
def test_all_hazards_of_tables_cut_by_rows(by_rows, hazards, strategy, n, microbatches, view):
    loss, params = loss_of(hazards), tables(hazards)
    want = one_device(loss, sgd(), params, batches())
    got = sharded(loss, opt_of(strategy, n), params, batches(), microbatches=microbatches, loss_view=view)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-6 if hazards is EXCHANGED else 1e-12)  # some tables are cast first
    if hazards is EXCHANGED:
        narrow = ("narrow", "in a jit", "mixer")
        assert_close(*({k: v for k, v in x[0].items() if k not in narrow} for x in (got, want)), 1e-12)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_layout_says_which_tables_are_only_looked_up(strategy):
    opt, (batch,) = opt_of(strategy), batches(1)
    said = jaxshard.value_and_grad(EXCHANGES, opt).layout(TABLES[EXCHANGES], batch).gathers
    inside = {name for name in EXCHANGED if name.startswith(("in a scan", "in a remat"))}
    assert {names[0] for names, how in said.items() if "rows" not in how} == inside | {"mixer"}
    said = jaxshard.value_and_grad(GATHERS, opt).layout(TABLES[GATHERS], batch).gathers
    assert not [names for names, how in said.items() if "rows" in how]


@pytest.mark.parametrize("name", [name for name in EXCHANGED if name != "by tangents"])  # which are a whole table
def test_no_device_makes_a_table_or_its_gradient(name):
    """Else the results above would prove nothing of the exchange."""
    opt, (batch,) = opt_of("zero3"), batches(1)
    loss, params = loss_of({name: EXCHANGED[name]}), opt.place(tables([name]))
    program = jax.jit(jaxshard.value_and_grad(loss, opt)).lower(params, batch).as_text()
    assert f"tensor<{VOCABULARY}x{WIDTH // 4}x" in program
    shared = program.partition("sdy.manual_computation")[2]  # one device's part
    assert shared
    assert f"tensor<{VOCABULARY}x{WIDTH}x" not in shared.partition("sdy.return")[0]
    assert "all_to_all" in shared


@pytest.mark.parametrize("view", ["local", "global"])
@pytest.mark.parametrize("name", ["plain", "asked", "taken", "filled", "unsharded", "both", "under vmap", "in a jit"])
def test_no_device_makes_a_table_cut_by_rows(by_rows, name, view):
    opt, (batch,) = opt_of("zero3"), batches(1)
    loss, params = loss_of({name: EXCHANGED[name]}), opt.place(tables([name]))
    f = jaxshard.value_and_grad(loss, opt, loss_view=view)
    found = jaxshard.inspect.report(jax.jit(f).lower(params, batch).compile())
    assert found.wire_bytes < 3 * ROWS * LENGTH * WIDTH * 8 < 1.5 * VOCABULARY * WIDTH * 8
    assert all(c.bytes < VOCABULARY * WIDTH * 8 for c in found.collectives)


def fraction(table, ids, num, dtype=jnp.float64):
    """The elements that an exchange moves, of those that a gather does, in bytes: ids of 4 bytes go to all."""
    row = table[1] * dtype.dtype.itemsize
    return ids * (row + 4 * num) / (table[0] * row)


@pytest.mark.parametrize("num_ids", [1, 44, 45, 100])
def test_rows_are_exchanged_where_that_moves_less_than_half(num_ids):
    opt, ids = opt_of("zero3"), np.zeros((4 * num_ids,), np.int32)
    params = {"t": np.zeros((99, 16))}
    said = {}
    for find_rows in (plain, find):
        ours = jaxshard.value_and_grad(lambda p, ids, rows=find_rows: jnp.mean(rows(p["t"], ids)), opt)
        (said[find_rows],) = ours.layout(params, ids).gathers.values()
    assert ("rows" in said[plain]) == (2 * fraction((99, 16), num_ids, 4) <= 1)
    assert "rows" in said[find]


# Meshes, shapes and dtypes.


def some(params, batch):
    """What most losses do: a table that is tied, one that is not, and positions."""
    ids = batch["ids"]
    rows = params["tied"][ids] + find(params["own"], ids % 61) + find(params["places"], jnp.arange(LENGTH))
    deep = find(params["deep"], ids % 50).reshape(*ids.shape, -1)[..., :WIDTH] + params["odd"][ids % 77][..., :1]

    def layer(x, t):
        return x + find(t, ids % 31), None

    rows, _ = lax.scan(jax.checkpoint(layer), rows + deep, params["stack"])
    targets = jax.nn.log_softmax(jnp.tanh(rows) @ params["tied"].T)
    return jnp.mean(jnp.square(rows - batch["y"])) - jnp.mean(jnp.take_along_axis(targets, ids[..., None], -1))


SHAPES = {"tied": (VOCABULARY, WIDTH), "own": (61, WIDTH), "places": (7, WIDTH), "odd": (77, 5)}
SHAPES |= {"deep": (50, 4, 8), "stack": (3, 31, WIDTH)}


def some_tables(dtype=np.float64):
    rng = np.random.default_rng(2)
    return {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def wanted():
    with jax.enable_x64(True):
        return one_device(some, sgd(), some_tables(), batches())


def mesh_of(kind, **axes):
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


MESHES = {
    "one device": ("zero3", {"data": 1}, {}),
    "two devices": ("zero2", {"data": 2}, {}),
    "two axes": ("zero3", {"slice": 2, "data": 4}, {"data_axes": ("slice", "data")}),
    "two axes, turned": ("zero2", {"slice": 2, "data": 2}, {"data_axes": ("data", "slice")}),
    "replicas": ("hsdp", {"replica": 2, "data": 2}, {}),
    "explicit": ("zero3", {"data": 4}, {}),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", MESHES)
def test_meshes(as_on, wanted, name, platform):
    strategy, axes, options = MESHES[name]
    mesh = mesh_of(AxisType.Explicit if name == "explicit" else AxisType.Auto, **axes)
    if platform == "gpu":
        as_on(platform)
    got = sharded(some, opt_of(strategy, mesh=mesh, **options), some_tables(), batches())
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_checked_types_beside_a_tensor_axis(zero):
    def loss(params, batch):
        x = find(params["t"], batch["ids"]) + params["t"][batch["ids"][:, ::-1]]
        y = tensor.row_parallel(jnp.tanh(tensor.column_parallel(x, params["up"])), params["down"])
        return jnp.mean(jnp.square(y - batch["y"]))

    rng = np.random.default_rng(4)
    params = {"t": rng.normal(size=(VOCABULARY, WIDTH)), "up": rng.normal(size=(WIDTH, 8)) / 5}
    params |= {"down": rng.normal(size=(8, WIDTH)) / 3}
    specs = [("up", P(None, "tensor")), ("down", P("tensor")), (".*", P())]
    mesh = jaxshard.make_mesh(tensor=2, devices=jax.devices()[:4])
    opt = jaxshard.hybrid(sgd(), mesh, specs, zero=zero, min_shard_size=1)
    want, got = one_device(loss, sgd(), params, batches()), sharded(loss, opt, params, batches())
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.filterwarnings("ignore:.*do the same work:UserWarning")
@pytest.mark.parametrize("rows_of", [plain, find])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P(None, "tensor"), P("tensor", None)])
def test_the_global_view_beside_a_tensor_axis(kind, spec, rows_of):
    """The data axis cuts the rows, or the features, and `specs` the same dim or the other."""
    shapes = {"by rows": (248, 6), "by features": (249, 8)}
    rng = np.random.default_rng(4)
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}

    def loss(params, batch):
        found = [rows_of(params[name], batch["ids"]) for name in shapes]
        return sum(jnp.mean((jnp.tanh(x) - x.mean(0)) ** 3) for x in found)

    specs = [("by rows", spec), ("by features", P())]
    opt = opt_of("zero3", mesh=mesh_of(kind, data=4, tensor=2), specs=specs)
    want = one_device(loss, sgd(), params, batches())
    for a, b in zip(sharded(loss, opt, params, batches(), loss_view="global"), want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": jnp.float32}, {"master_dtype": jnp.float32}])
def test_tables_in_bfloat16(options):
    params = some_tables(jnp.bfloat16)
    want = one_device(some, sgd(), params, batches())
    got = sharded(some, opt_of("zero3", **options), params, batches())
    assert_close(got[0], want[0], 2**-7)
    assert got[2][0] == pytest.approx(want[2][0], rel=2**-7)


@pytest.mark.parametrize("rows_of", [plain, find])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_tables_that_are_rounded_by_a_cast_and_cast_back(strategy, rows_of):
    """Each cast counts; only the gradient, which is summed wide, is not rounded as the table is."""
    rounded = {"t": lambda t, ids: rows_of(t.astype(jnp.bfloat16).astype(jnp.float64), ids)}
    loss, params, (batch,) = loss_of(rounded), tables(rounded), batches(1)
    opt = opt_of(strategy)
    got = jaxshard.value_and_grad(loss, opt)(opt.place(params), batch)
    want = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert_close(got[0], want[0], 1e-13)
    assert_close(got[1], want[1], 2**-8)


# Other ways in.


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_evaluate_and_predict(strategy):
    """Callers may differentiate an evaluation, forwards, too."""
    opt, params, (batch,) = opt_of(strategy), some_tables(), batches(1)
    placed, whole = opt.place(params), jax.tree.map(jnp.asarray, params)
    evaluate, alone = jaxshard.evaluate(some, opt), lambda p: some(p, batch)
    assert_close(evaluate(placed, batch), alone(whole), 1e-14)
    assert_close(jax.jit(jax.grad(lambda p: evaluate(p, batch)))(placed), jax.grad(alone)(whole), 1e-12)
    tangent = jax.jit(lambda p: jax.jvp(lambda p: evaluate(p, batch), (p,), (p,))[1])(placed)
    assert_close(tangent, jax.jvp(alone, (whole,), (whole,))[1], 1e-12)
    rows = jaxshard.predict(lambda p, batch: find(p["tied"], batch["ids"]), opt)(placed, batch)
    np.testing.assert_array_equal(rows, params["tied"][batch["ids"]])


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_gradients_differentiated_forwards_are_refused_with_the_cure(strategy):
    opt, params, (batch,) = opt_of(strategy), some_tables(), batches(1)
    placed, gradients = opt.place(params), jaxshard.value_and_grad(some, opt)
    # As jax.hessian and jax.jacfwd do, along one direction: all directions at a time would take 10 GB.
    for differentiated in (jax.grad(lambda p: gradients(p, batch)[0]), lambda p: gradients(p, batch)[1]):
        with pytest.raises(TypeError, match=r"forward mode .* jax\.grad\(lambda p: optax\.tree\.vdot"):
            jax.jvp(differentiated, (placed,), (placed,))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradients_can_be_differentiated(strategy):
    opt, params, (batch,) = opt_of(strategy), some_tables(), batches(1)

    def curved(gradients_of):
        return lambda p: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(gradients_of(p)))

    ours = jaxshard.value_and_grad(some, opt)
    got = jax.jit(jax.grad(curved(lambda p: ours(p, batch)[1])))(opt.place(params))
    want = jax.grad(curved(jax.grad(lambda p: some(p, batch))))(jax.tree.map(jnp.asarray, params))
    assert_close(got, want, 1e-12)


def test_by_itself_it_is_indexing():
    table, ids = np.arange(12.0).reshape(4, 3), np.array([[3, -1], [0, 2]])
    np.testing.assert_array_equal(find(table, ids), table[ids])
    np.testing.assert_array_equal(jax.jit(find)(table, ids), table[ids])
    np.testing.assert_array_equal(jax.vmap(find, (None, 0))(table, ids), table[ids])
    np.testing.assert_array_equal(jax.vmap(jax.vmap(lambda i: find(table, i)))(ids), table[ids])
    np.testing.assert_array_equal(find(table, [3, 0]), table[[3, 0]])
    gradient = jax.grad(lambda t: jnp.sum(find(t, ids) ** 2))(table)
    np.testing.assert_array_equal(gradient, [*2 * table[:1], np.zeros(3), 2 * table[2], 4 * table[3]])


@pytest.mark.parametrize("ids", [None, 1.0, np.ones(2), np.ones(2, bool), slice(0, 2), [0.5], []])
def test_ids_are_whole_numbers(ids):
    with pytest.raises(TypeError, match="ids must be integers, an array or a list"):
        find(np.ones((4, 3)), ids)


@pytest.mark.parametrize("table", [{"w": np.ones((4, 3))}, np.float32(1), None])
def test_the_table_is_one_array_with_rows(table):
    with pytest.raises(TypeError, match=r"lookup: the table must be one array of \(V, ..., D\), got a "):
        find(table, [0])


# Planted bugs.


def rolled(x, *args, **how):
    return jnp.roll(REAL["all_to_all"](x, *args, **how), 1, -1)


def reversed_ids(x, *args, **how):
    return REAL["all_gather"](x, *args, **how)[::-1]


REAL = {name: getattr(lax, name) for name in ("all_to_all", "all_gather")}


@pytest.mark.parametrize(("name", "planted"), [("all_to_all", rolled), ("all_gather", reversed_ids)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_planted(monkeypatch, strategy, name, planted):
    hazards = {"plain": plain}
    want = one_device(loss_of(hazards), sgd(), tables(hazards), batches())
    shadow = {key: getattr(lax, key) for key in dir(lax) if not key.startswith("__")} | {name: planted}
    monkeypatch.setattr(lookup, "lax", types.SimpleNamespace(**shadow))
    got = sharded(loss_of(hazards), opt_of(strategy), tables(hazards), batches())
    assert max(distances(got[1], want[1]).values()) > 1e-3
