"""Every primitive that JAX has is known to be right in the local view, and shown to be so by running it; or is refused.

Primitives are found as the objects that they are: all instances of `jax.extend.core.Primitive` in this process.
"""

import functools
import gc
import subprocess
import sys

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from primitive_samples import POINTWISE, PURE, operands

from jaxshard.optimizer.local import elementwise
from jaxshard.optimizer.local.labels import FILL, SAME, Shard
from jaxshard.programs import primitives
from jaxshard.programs.jaxprs import open_jaxpr, subprograms

WHOLE, PART, NUM_PARTS = (4, 6), (4, 3), 2
AXES = frozenset({"data"})
SHARD = Shard("w", ((-1, ("data",)),))
FOLLOWED = primitives.CALLS | primitives.CONTROL
# Known to be right, with no sample: these change a type or a place, and no number.
UNCHANGED = {"copy_p", "optimization_barrier", "pcast", "pvary", "reshard", "sharding_constraint", "stop_gradient"}


def every_primitive():
    """By name; importing Pallas brings the last."""
    return {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}


ALL = every_primitive()


def names_in(program):
    for eqn in open_jaxpr(program).eqns:
        yield eqn.primitive.name
        for inner in subprograms(eqn):
            yield from names_in(inner)


def shapes(kinds, shape):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(kinds, shape)]


def traced(fn, kinds, shape):
    return jax.make_jaxpr(fn)(*shapes(kinds, shape))


def check(fn, kinds, label, shape=PART, wanted=None):
    """The rule for one use of an operation, on parts beside wholes."""
    one = traced(fn, kinds, shape)
    wanted = wanted or label
    results = [elementwise.Result("w", wanted, v.aval.shape) for v in open_jaxpr(one).outvars]
    elementwise.check_elementwise(one, traced(fn, kinds, WHOLE), [label] * len(kinds), results, AXES)


def test_all_are_found():
    assert len(ALL) > 250
    assert {"add", "io_callback", "pallas_call", "psum", "custom_partitioning", "new_ref"} <= ALL.keys()


EVERY = """
import gc, jax, jax.experimental.multihost_utils, jax.experimental.pallas
from jax.extend.core import Primitive
print(*{p.name for p in gc.get_objects() if isinstance(p, Primitive)})
"""


def test_every_primitive_has_a_row():
    """A newer JAX's new ones want a look: which words hold for each? Asked in a process that no other test adds to."""
    found = subprocess.run([sys.executable, "-c", EVERY], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) > 250
    assert sorted({*found} - primitives.ROWS.keys()) == []


def test_whatever_is_known_has_a_sample():
    known = elementwise.KNOWN & ALL.keys()
    assert known - UNCHANGED == known & (POINTWISE.keys() | PURE.keys())
    assert not POINTWISE.keys() & PURE.keys()


@pytest.mark.parametrize("name", sorted(POINTWISE.keys() | PURE.keys()))
def test_a_sample_holds_its_primitive(name):
    fn, kinds = (POINTWISE | PURE)[name]
    assert name in names_in(traced(fn, kinds, WHOLE))


# Pointwise: right on parts.


@functools.cache
def run_pointwise():
    """For each pointwise primitive: (its results on two parts, the parts of its result on the whole)."""

    def run(args):
        return {name: POINTWISE[name][0](*args[name]) for name in args}

    whole = {name: operands(kinds, WHOLE) for name, (_, kinds) in POINTWISE.items()}
    parts = [jax.tree.map(lambda x, i=i: np.split(x, NUM_PARTS, 1)[i], whole) for i in range(NUM_PARTS)]
    wanted, got = jax.jit(run)(whole), [jax.jit(run)(part) for part in parts]
    return {name: ([one[name] for one in got], np.split(np.asarray(wanted[name]), NUM_PARTS, 1)) for name in whole}


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_pointwise_primitives_are_right_on_parts(name):
    check(*POINTWISE[name], SHARD)
    got, wanted = run_pointwise()[name]
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_pointwise_primitives_keep_one_number_one_number(name):
    fn, kinds = POINTWISE[name]
    check(fn, kinds, FILL)
    found = [fn(*(jnp.full(shape, x[1, 1]) for x in operands(kinds, WHOLE))) for shape in (WHOLE, PART)]
    np.testing.assert_array_equal(np.unique(found[0]), np.unique(found[1]))
    assert np.unique(found[0]).size == 1


# Pure: equal on every device; refused on parts.


@functools.cache
def run_pure():
    """For each pure primitive: (its result on each of 8 devices, that on one)."""

    def run(args):
        return {name: PURE[name][0](*args[name]) for name in args}

    args = {name: operands(kinds, WHOLE) for name, (_, kinds) in PURE.items()}
    mesh = jax.make_mesh((8,), ("data",))
    stacked = jax.jit(
        jax.shard_map(
            lambda x: jax.tree.map(lambda y: y[None], run(x)),
            mesh=mesh,
            in_specs=P(),
            out_specs=P("data"),
            check_vma=False,
        )
    )
    return jax.device_get((stacked(args), jax.jit(run)(args)))


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_primitives_give_every_device_the_same(name):
    check(*PURE[name], SAME, WHOLE, SAME)
    got, wanted = (results[name] for results in run_pure())
    assert len(got) == 8
    for one in got:
        np.testing.assert_array_equal(one, got[0])
    np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-5)


def put_in_place_of_add(primitive, **params):
    """A program of one equation, `x + x`, with another primitive in its place."""
    program = traced(lambda x: x + x, "n", PART), traced(lambda x: x + x, "n", WHOLE)
    found = []
    for one in program:
        jaxpr = open_jaxpr(one)
        (eqn,) = jaxpr.eqns
        jaxpr = jaxpr.replace(eqns=[eqn.replace(primitive=primitive, params=eqn.params | params)])
        found.append(jax.extend.core.ClosedJaxpr(jaxpr, ()))
    return found


def refused(primitive, label, **params):
    results = [elementwise.Result("w", label, PART)]
    with pytest.raises(elementwise.NotElementwise) as caught:
        elementwise.check_elementwise(*put_in_place_of_add(primitive, **params), [label], results, AXES)
    return caught.value.mixed


SHAPE_ALONE = {"broadcast_in_dim", "reshape"}  # right where the shape stays, as it does here


@pytest.mark.parametrize("name", sorted((primitives.PURE & ALL.keys()) - SHAPE_ALONE))
def test_pure_primitives_are_refused_on_parts(name):
    assert f"`{name}`" in refused(ALL[name], SHARD).what


@pytest.mark.parametrize("dimensions", [(1, 0), None])
def test_a_reshape_may_turn_dims_round(dimensions):
    """By its parameter `dimensions`, even where the shape stays."""
    if dimensions is None:
        elementwise.check_elementwise(
            *put_in_place_of_add(ALL["reshape"], dimensions=None),
            [SHARD],
            [elementwise.Result("w", SHARD, PART)],
            AXES,
        )
    else:
        assert "`reshape`" in refused(ALL["reshape"], SHARD, dimensions=dimensions).what


# All others are refused.


@pytest.mark.parametrize("label", [SHARD, SAME], ids=["parts", "wholes"])
def test_all_other_primitives_are_refused(label):
    others = ALL.keys() - elementwise.KNOWN - FOLLOWED - {"optimization_barrier"} - primitives.DEBUGGING
    assert len(others) > 100
    for name in sorted(others):
        mixed = refused(ALL[name], label)
        assert mixed.fault == "is not known", name
        assert f"`{name}`" in mixed.what


def test_debugging_is_no_effect_and_every_other_effect_is():
    def looks(x):
        jax.debug.print("{}", x)
        jax.debug.callback(lambda x: None, x)
        return x * 2

    check(looks, "n", SHARD)

    def acts(x):
        jax.experimental.io_callback(lambda x: None, None, x)
        return x * 2

    for inside in (acts, jax.jit(acts), lambda x: jax.lax.cond(True, acts, lambda x: x, x)):
        with pytest.raises(elementwise.NotElementwise, match="`io_callback`, which has an effect"):
            check(inside, "n", SHARD)


def test_an_effect_behind_the_end_of_what_is_alike_is_seen():
    def acts(x):
        if x.shape == PART:
            jax.experimental.io_callback(lambda x: None, None, x)
        return x * 2

    with pytest.raises(elementwise.NotElementwise, match="io_callback"):
        check(acts, "n", SHARD)


# Calls and loops are followed.


def composite(x):
    return jax.lax.composite(lambda x: x * 2, "twice")(x)


def checkpointed(x):
    return jax.checkpoint(lambda x: jnp.sin(x) * 2)(x)


def rows(x):
    return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0]


def until(x):
    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]


@jax.custom_vjp
def ruled(x):
    return x * 2


ruled.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct,))
THROUGH = {
    "composite": composite,
    "remat2": checkpointed,
    "jit": jax.jit(lambda x: x * 2),
    "custom_jvp_call": jax.nn.relu,
    "custom_vjp_call": ruled,
    "scan": rows,
    "while": until,
    "cond": lambda x: jax.lax.cond(jnp.bool_(True), lambda x: x * 2, lambda x: x, x),
}


@pytest.mark.parametrize("name", list(THROUGH))
def test_calls_and_loops_are_followed(name):
    fn = THROUGH[name]
    assert any(found in (name, "checkpoint") for found in names_in(traced(fn, "n", PART)))
    check(fn, "n", SHARD)
    with pytest.raises(elementwise.NotElementwise):
        check(lambda x: fn(jnp.cumsum(x, 1)), "n", SHARD)


def test_every_call_and_loop_that_exists_has_a_sample():
    aliases = {"checkpoint", "remat", "pjit", "call", "closed_call", "core_call", "custom_vjp_call_jaxpr"}
    assert (FOLLOWED & ALL.keys()) - aliases - {"custom_jvp_call_jaxpr"} <= THROUGH.keys()


# Programs within operations are compared.


def sized(x, program):
    return x * program(jnp.ones(1), x.size)[0]


@pytest.mark.parametrize(
    "program",
    [
        lambda one, size: jax.lax.reduce_window(one, 0.0, lambda a, b: a + b * size, (1,), (1,), "VALID"),
        lambda one, size: jax.lax.reduce(jnp.ones((1, 3)), 0.0, lambda a, b: a + b * size, (1,)),
        lambda one, size: jax.lax.composite(lambda x: x * size, "sized")(one),
        lambda one, size: jax.lax.custom_linear_solve(lambda v: v * size, one, lambda _, b: b / size),
        lambda one, size: jax.lax.fori_loop(0, 2, lambda i, x: x * size, one),
        lambda one, size: jax.jit(lambda x: x * size)(one),
    ],
    ids=["reduce_window", "reduce", "composite", "custom_linear_solve", "loop", "jit"],
)
def test_a_size_within_a_program_is_found(program):
    with pytest.raises(elementwise.NotElementwise):
        check(lambda x: sized(x, program), "n", SHARD)


def test_a_program_alike_is_accepted():
    programs = (lambda one: jax.lax.reduce_window(one, 0.0, lambda a, b: a + b * 3, (1,), (1,), "VALID"), composite)
    for program in programs:
        check(lambda x, program=program: x * program(jnp.ones(1))[0], "n", SHARD)


def test_bits_of_a_narrower_type_are_no_longer_one_number():
    def narrower(x):
        return x * jnp.max(jax.lax.bitcast_convert_type(jnp.full(x.shape, 1.5), jnp.uint8)).astype(x.dtype)

    with pytest.raises(elementwise.NotElementwise, match="`bitcast_convert_type`"):
        check(narrower, "n", SHARD)
