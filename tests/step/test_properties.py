"""Properties of random trees, meshes and options: training equals one device's; layouts are sound.

In CI the examples are the same each time; `-m nightly` draws 500 new ones. What fails is printed whole, as arguments
and as a line for `@reproduce_failure`.
"""

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import assert_close, distances

import jaxshard
from jaxshard import collectives
from jaxshard.base.types import local_shape
from jaxshard.layout.cutting import cut_leaf
from jaxshard.layout.layout import check_specs_used, layout_params, layout_state
from jaxshard.layout.options import Config

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
IN_CI = settings(max_examples=50, derandomize=True, **COMMON)
NIGHTLY = settings(max_examples=500, **COMMON)
PURE = settings(max_examples=500, derandomize=True, **COMMON)


# What is drawn.


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A leaf; `dim` is cut over "tensor" where that divides it."""

    shape: tuple[int, ...]
    dtype: str
    dim: int


@dataclasses.dataclass(frozen=True)
class Setting:
    tree: Any
    sizes: dict[str, int]
    strategy: str
    optimizer: str
    microbatches: int
    rows_each: int
    weighted: bool
    explicit: bool
    unshard: bool
    min_shard_size: int
    num_steps: int

    @property
    def leaves(self) -> list[Drawn]:
        return jax.tree.leaves(self.tree)

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.sizes if axis not in ("replica", "tensor"))

    @property
    def num_chunks(self) -> int:
        return self.microbatches * math.prod(size for axis, size in self.sizes.items() if axis != "tensor")

    def tensor_dim(self, leaf: Drawn) -> int | None:
        tensor = self.sizes["tensor"]
        fits = tensor > 1 and leaf.dim < len(leaf.shape) and leaf.shape[leaf.dim] % tensor == 0
        return leaf.dim if fits and math.prod(leaf.shape) else None

    def spec(self, leaf: Drawn) -> P:
        dim = self.tensor_dim(leaf)
        return P() if dim is None else P(*[None] * dim, "tensor")


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 8, 16]), max_size=3).map(tuple)
SHAPES = st.one_of(SHAPES, SHAPES, st.sampled_from([(0,), (0, 4), (8, 0)])).filter(lambda s: math.prod(s) <= 256)
EXACT = ("sgd", "adamw", "clipped adam", "lamb", "adafactor", "every other")
NARROW = ("sgd", "clipped sgd")
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "clipped sgd": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "every other": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


def trees(dtypes, max_leaves=4):
    leaf = st.builds(Drawn, SHAPES, st.sampled_from(dtypes), st.integers(0, 2))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(["a", "b", "w"]), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=max_leaves,
    ).filter(lambda tree: len(jax.tree.leaves(tree)) <= max_leaves)


@st.composite
def sizes_of_meshes(draw):
    """Axis -> size, of at most 8 devices."""
    axes = draw(st.sampled_from([("replica", "data", "tensor"), ("replica", "slice", "data", "tensor")]))
    left, sizes = 8, {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= left]))
        left //= sizes[axis]
    return {axis: sizes[axis] for axis in axes}


def setups(dtypes, optimizers):
    return st.builds(
        Setting,
        tree=trees(dtypes),
        sizes=sizes_of_meshes(),
        strategy=st.sampled_from(["zero3", "zero2", "zero1", "hsdp", "ddp"]),
        optimizer=st.sampled_from(optimizers),
        microbatches=st.integers(1, 4),
        rows_each=st.integers(1, 2),
        weighted=st.booleans(),
        explicit=st.booleans(),
        unshard=st.booleans(),
        min_shard_size=st.sampled_from([0, 0, 1, 20]),
        num_steps=st.integers(2, 3),
    )


# Training.


def loss_of(setting, *, sharded):
    """Convex and separable, so that rounding stays where it is; each element has its own pull to its own target."""

    def loss(params, batch):
        params = jaxshard.unshard(params) if sharded and setting.unshard else params
        each_row = jnp.zeros_like(batch["x"])
        for i, (leaf, drawn) in enumerate(zip(jax.tree.leaves(params), setting.leaves, strict=True)):
            dim = setting.tensor_dim(drawn) if sharded else None
            term = leaf_term(leaf, batch["x"], dim, i)
            each_row += term if dim is None else lax.psum(term, "tensor")
        if setting.weighted:
            return jnp.sum(each_row * batch["weight"]), jnp.sum(batch["weight"])
        return jnp.mean(each_row)

    return loss


def leaf_term(leaf, x, dim, index):
    """(rows,). All rows pull an element to one side, by different amounts: gradients do not cancel."""
    phase = jnp.full(leaf.shape, float(index), x.dtype)
    for d in range(leaf.ndim):
        number = lax.broadcasted_iota(x.dtype, leaf.shape, d)
        if d == dim:
            number += (lax.axis_index("tensor") * leaf.shape[d]).astype(x.dtype)
        phase += (d + 1.7) * number
    pull = 1 + 0.5 * jnp.sin(phase + x.reshape((-1,) + (1,) * leaf.ndim))
    away = leaf - (3 + jnp.cos(phase)).astype(leaf.dtype)
    terms = 0.5 * jnp.square(away) * pull.astype(leaf.dtype)
    return jnp.sum(terms, tuple(range(1, terms.ndim))).astype(x.dtype)


def start_of(setting):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: np.asarray(rng.uniform(-1, 1, leaf.shape), jnp.dtype(leaf.dtype)), setting.tree)


def batches_of(setting):
    rows, rng = setting.num_chunks * setting.rows_each, np.random.default_rng(6)
    weights = [rng.integers(0, 3, rows).astype(float) for _ in range(setting.num_steps)]
    wide = jnp.zeros(()).dtype
    return [{"x": rng.normal(size=rows).astype(wide), "weight": (w + (w.sum() == 0)).astype(wide)} for w in weights]


def on_one_device(setting):
    tx, loss = OPTIMIZERS[setting.optimizer](), loss_of(setting, sharded=False)

    def mean(params, batch):
        out = loss(params, batch)
        return out[0] / out[1] if setting.weighted else out

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(mean)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, start_of(setting))
    state = tx.init(params)
    for batch in batches_of(setting):
        params, state = step(params, state, batch)
    return params, state


def sharded(setting):
    types = (AxisType.Explicit if setting.explicit else AxisType.Auto,) * len(setting.sizes)
    devices = jax.devices()[: math.prod(setting.sizes.values())]
    mesh = jax.make_mesh(tuple(setting.sizes.values()), tuple(setting.sizes), axis_types=types, devices=devices)
    options = {"data_axes": setting.data_axes, "min_shard_size": setting.min_shard_size}
    specs = jax.tree.map(setting.spec, setting.tree)
    opt = getattr(jaxshard, setting.strategy)(OPTIMIZERS[setting.optimizer](), mesh, specs=specs, **options)
    options = {"microbatches": setting.microbatches, "weighted": setting.weighted}
    step = jaxshard.train_step(loss_of(setting, sharded=True), opt, **options)
    params = opt.place(start_of(setting))
    state = opt.init(params)
    for batch in batches_of(setting):
        params, state, _ = step(params, state, batch)
    return params, state


def both(setting):
    note(f"P specs: {[setting.spec(leaf) for leaf in setting.leaves]}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(cannot be sharded|do the same work)", UserWarning)
        return sharded(setting), on_one_device(setting)


def check_exact(setting):
    """In double precision, within 1e-12 of each leaf's norm."""
    with jax.enable_x64(True):
        assert_close(*both(setting), 1e-12)


def check_narrow(setting):
    """In mixed precision, within what rounding may do.

    Gradients do not cancel, so each is off by at most one rounding for each chunk that is summed and some for what is
    computed of it; it moves an element that is about as large as itself. Clipping spreads the coarsest leaf's error.
    """
    with jax.enable_x64(True):
        got, want = both(setting)
    roundings = (setting.num_chunks + 16) * setting.num_steps
    dtypes = [jnp.dtype(leaf.dtype) for leaf in setting.leaves]
    coarsest = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    leaves = jax.tree.leaves(want)
    for (path, far), leaf in zip(distances(got, want).items(), leaves, strict=True):
        own = float(jnp.finfo(leaf.dtype).eps) if jnp.issubdtype(leaf.dtype, jnp.floating) else 0.0
        eps = coarsest if setting.optimizer == "clipped sgd" else own
        assert far <= roundings * eps, f"{path}: {far}, {roundings * eps} allowed"


exactly = given(setting=setups(["float64"], EXACT))
narrowly = given(setting=setups(["float64", "float32", "bfloat16"], NARROW))


@IN_CI
@exactly
def test_training_equals_one_device(setting):
    check_exact(setting)


@settings(IN_CI, max_examples=15)
@narrowly
def test_training_in_mixed_precision_is_near_one_device(setting):
    check_narrow(setting)


@pytest.mark.nightly
@NIGHTLY
@exactly
def test_training_equals_one_device_nightly(setting):
    check_exact(setting)


@pytest.mark.nightly
@NIGHTLY
@narrowly
def test_training_in_mixed_precision_is_near_one_device_nightly(setting):
    check_narrow(setting)


# The properties can fail.


@pytest.mark.parametrize("bug", ["lost sum", "mean for sum"])
def test_a_planted_bug_is_found(monkeypatch, bug):
    real = collectives.scatter_sum
    wrong = {
        "lost sum": lambda x, dims: collectives.own_part(x, dims, SIZES) if dims else x,
        "mean for sum": lambda x, dims: real(x, dims) / 2 if dims else x,
    }
    SIZES = {"replica": 1, "data": 4, "tensor": 1}
    monkeypatch.setattr(collectives, "scatter_sum", wrong[bug])
    tree = st.builds(Drawn, st.just((8, 4)), st.just("float64"), st.just(2)).map(lambda leaf: {"w": leaf})
    setup = setups(["float64"], ("sgd", "every other")).flatmap(
        lambda s: tree.map(
            lambda t: dataclasses.replace(s, tree=t, sizes=SIZES, strategy="zero2", min_shard_size=0, weighted=False)
        )
    )
    check = settings(max_examples=3, derandomize=True, database=None, phases=[Phase.generate], **COMMON)
    with pytest.raises(AssertionError):
        check(given(setting=setup)(lambda setting: check_exact(setting)))()


# Layouts, which need no devices.


BIG = {"data": [1, 2, 3, 4, 8, 128], "slice": [1, 2, 4], "tensor": [1, 2, 4]}
sizes_st = st.fixed_dictionaries({axis: st.sampled_from(sizes) for axis, sizes in BIG.items()})
platform_st = st.sampled_from(["cpu", "gpu", "tpu"])
config_st = st.builds(
    Config,
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "hsdp"]),
    data_axes=st.sampled_from([("data",), ("slice", "data"), ("data", "slice")]),
    min_shard_size=st.sampled_from([0, 1, 64, 2048]),
)
long_st = st.lists(st.sampled_from([0, 1, 2, 3, 8, 12, 17, 128, 768, 1024]), max_size=4).map(tuple)


@st.composite
def specs_st(draw, shape, tensor):
    dims = [dim for dim, size in enumerate(shape) if size % tensor == 0]
    dim = draw(st.sampled_from([None, *dims]))
    return P() if dim is None else P(*[None] * dim, "tensor")


def axes_of(spec):
    return [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]


@PURE
@given(data=st.data(), shape=long_st, sizes=sizes_st, config=config_st, platform=platform_st)
def test_every_cut_divides_and_takes_free_dims_alone(data, shape, sizes, config, platform):
    spec = data.draw(specs_st(shape, sizes["tensor"]))
    leaf = cut_leaf(("w",), shape, jnp.float32, spec, sizes, config, platform)
    for dim, entry in enumerate(leaf.cut):
        axes = axes_of([entry])
        assert shape[dim] % math.prod(sizes[axis] for axis in axes) == 0
        if dim < len(spec) and spec[dim] is not None:
            assert entry == spec[dim]
        else:
            assert set(axes) <= set(config.data_axes)
    used = axes_of(leaf.cut)
    assert len(used) == len(set(used))
    cut = [axis for axis in used if axis in config.data_axes]
    assert leaf.ways == math.prod(sizes[axis] for axis in cut)
    assert sorted(cut) == sorted(axis for _, axes in leaf.dims for axis in axes)
    assert all(leaf.cut[len(shape) + dim] in (axes, axes[0]) for dim, axes in leaf.dims)


@PURE
@given(data=st.data(), shape=long_st, sizes=sizes_st, config=config_st, platform=platform_st)
def test_the_bytes_of_all_parts_are_the_leafs(data, shape, sizes, config, platform):
    spec = data.draw(specs_st(shape, sizes["tensor"]))
    leaf = cut_leaf(("w",), shape, jnp.bfloat16, spec, sizes, config, platform)
    parts = math.prod(sizes[axis] for axis in axes_of(leaf.cut))
    assert leaf.bytes(leaf.cut, sizes) * parts == 2 * math.prod(shape)
    assert math.prod(local_shape(shape, leaf.cut, sizes)) * parts == math.prod(shape)


@PURE
@given(tree=trees(["float32", "bfloat16"], max_leaves=6), sizes=sizes_st, config=config_st, platform=platform_st)
def test_state_follows_params_and_bytes_add_up(tree, sizes, config, platform):
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)), tree)
    setting = dataclasses.replace(ANY, sizes=sizes)
    config = dataclasses.replace(config, specs=jax.tree.map(setting.spec, tree))
    found = layout_params(config, abstract, sizes, platform)
    check_specs_used(found)
    state = jax.eval_shape(optax.adam(1.0).init, abstract)
    laid = layout_state(found, state)
    count, *moments = laid.state
    assert (count.shape, count.cut) == ((), P())
    assert [leaf.cut for leaf in moments] == [leaf.cut for leaf in (*found.params, *found.params)]
    at_rest = {"params": config.cuts.params, "grads": config.cuts.state, "state": config.cuts.state}
    of = {"params": laid.params, "grads": laid.params, "state": laid.state}
    for kind, cut in at_rest.items():
        whole = [math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in of[kind]]
        parts = [math.prod(sizes[axis] for axis in axes_of(leaf.cut if cut else leaf.spec)) for leaf in of[kind]]
        assert laid.bytes_per_device[kind] == sum(size // n for size, n in zip(whole, parts, strict=True))


ANY = Setting({}, {}, "zero2", "sgd", 1, 1, False, False, False, 0, 1)
