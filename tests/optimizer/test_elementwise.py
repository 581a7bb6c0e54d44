"""The local view accepts a transformation if and only if it is element-wise in truth, as found by running it.

The truth: each leaf is cut in two, `update` runs on the whole leaves and on each half alone, and all that comes out
must be the same, bit for bit, through steps in which one half alone has large gradients, or one that is not a number.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from matrix import Case, batches, cases, plain

import jaxshard
from jaxshard.layout import layout
from jaxshard.optimizer.local import blame, elementwise, labels

CASES = cases()
# The matrix's leaves, cut on the first, a middle and the last dim, or not; few shapes, each compiles every operation.
SHAPES = {
    "embed": (34, 17),
    "blocks": {"up": (3, 8, 16), "gain": (3, 16)},
    "list": [(17, 17), (16,)],
    "odd": (34, 17),
    "scalar": (),
    "empty": (17, 17),
}
NUM_STEPS, NUM_PARTS = 5, 2


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """Thousands of small programs run six times each."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def mesh():
    return jaxshard.make_mesh(devices=jax.devices()[:NUM_PARTS])


def tree_of(case):
    rng = np.random.default_rng(11)
    tree = jax.tree.map(
        lambda s: np.asarray(0.5 * rng.normal(size=s), np.float32), SHAPES, is_leaf=lambda x: type(x) is tuple
    )
    return jax.tree.map(jnp.asarray, case.tree(tree))


def loss(params, batch):
    """Quick to compile; every row gives another gradient."""
    each = [(i + 1) * jnp.sum(jnp.square(leaf - 0.1)) for i, leaf in enumerate(jax.tree.leaves(params))]
    return jnp.mean(1 + jnp.square(batch["x"])) * sum(each)


# The truth.


def part(x, leaf, index):
    for dim, _ in leaf.dims:
        x = jnp.split(x, NUM_PARTS, axis=dim)[index]
    return x


def parts(tree, leaves, index):
    pairs = zip(jax.tree.leaves(tree), leaves, strict=True)
    return jax.tree.unflatten(jax.tree.structure(tree), [part(x, leaf, index) for x, leaf in pairs])


def gradients(tree, leaves, step):
    """Small ones, then large ones in the first half alone, then a NaN in the last element of one leaf."""
    rng = np.random.default_rng(step)
    scale = {0: 1e-3, 2: 1e3}.get(step, 1.0)
    grads = []
    for i, (x, leaf) in enumerate(zip(jax.tree.leaves(tree), leaves, strict=True)):
        halves = [np.asarray(rng.normal(size=part(x, leaf, half).shape), np.float32) for half in range(NUM_PARTS)]
        halves[0] *= np.float32(scale)
        halves[1] *= np.float32(min(scale, 1.0))
        if step == NUM_STEPS - 2 and i == 0:
            halves[1][(-1,) * x.ndim] = np.nan
        grads.append(jnp.concatenate(halves, leaf.dims[0][0]) if leaf.dims else jnp.asarray(halves[1]))
    return jax.tree.unflatten(jax.tree.structure(tree), grads)


def bits(x):
    x = jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else x
    x = np.asarray(x)
    number = np.isnan(x.astype(np.float64))  # the bits of a NaN say nothing
    return x.dtype, x.shape, np.where(number, 0, x).tobytes(), number.tobytes()


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and list(map(bits, jax.tree.leaves(a))) == list(
        map(bits, jax.tree.leaves(b))
    )


def has_control_flow(fn, *args):
    text = str(jax.make_jaxpr(fn)(*args))
    return any(f"{name}[" in text for name in ("cond", "while", "scan"))


def differs(case):
    """Where the halves' run first departs from the whole's; None: nowhere, it is element-wise."""
    tree, tx = tree_of(case), plain(case)
    opt = jaxshard.zero2(tx, mesh(), min_shard_size=1)
    found = opt.layout(tree)
    extra = functools.partial(case.extra, loss, tree, batches(1, np.float32)[0])

    def update(grads, state, params, value, whole_grads):
        updates, state = tx.update(grads, state, params, value=value, grad=whole_grads, **extra())
        return updates, state, optax.apply_updates(params, updates)

    state = tx.init(tree)
    halves = [(parts(state, found.state, i), parts(tree, found.params, i)) for i in range(NUM_PARTS)]
    if case.extra is not type(case).extra or has_control_flow(update, tree, state, tree, jnp.float32(0), tree):
        update = jax.jit(update)  # else each operation compiles once for all cases
    for step in range(NUM_STEPS):
        grads, value = gradients(tree, found.params, step), jnp.float32(1 + step % 3)
        updates, state, tree = update(grads, state, tree, value, grads)
        for i in range(NUM_PARTS):
            try:
                mine, *after = update(parts(grads, found.params, i), *halves[i], value, grads)
            except (TypeError, ValueError) as error:
                return f"step {step}: {error}"
            cut = layout.layout_state(found, state).state
            if not same(mine, parts(updates, found.params, i)) or not same(after[0], parts(state, cut, i)):
                return f"step {step}"
            halves[i] = tuple(after)
    return None


# The verdict.


def refusal(case):
    """What the local view says against it; None: it accepts."""
    tree = tree_of(case)
    opt = jaxshard.zero2(case.make(), mesh(), min_shard_size=1)
    extra = case.extra(loss, tree, batches(1, np.float32)[0])

    def step(params, state, grads):
        grads = lax.pcast(grads, ("replica", "data"), to="varying")
        return opt.update(grads, state, params, value=jnp.float32(1), grad=params, **extra)

    specs = opt.shardings(tree).specs.state
    run = jax.shard_map(step, mesh=opt.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    state = jax.eval_shape(opt.inner.init, tree)
    try:
        jax.eval_shape(run, tree, state, tree)
    except ValueError as error:
        assert "not element-wise" in str(error)  # noqa: PT017
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_accepted_if_and_only_if_element_wise_in_truth(name):
    truth, verdict = differs(CASES[name]), refusal(CASES[name])
    assert (truth is None) == (verdict is None), f"in truth: {truth}; the local view: {verdict}"


# What the matrix does not have: numbers and constants taken from the shape, and what is harmless.


def each(fn):
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: fn(g) if g.size > 1 else g, updates))


def unused_norm(g):
    """A norm of which nothing but the shape is used."""
    return g + jnp.zeros_like(jnp.linalg.norm(g))


OTHERS = {
    "exponent": (lambda: each(lambda g: g ** g.shape[0]), False),
    "dot of ones": (lambda: each(lambda g: g * jnp.vdot(jnp.ones_like(g), jnp.ones_like(g))), False),
    "last index": (lambda: each(lambda g: g * jnp.arange(g.size)[-1]), False),
    "constant": (lambda: each(lambda g: g * jnp.asarray(np.array([g.size], g.dtype))[0]), False),
    "captured": (lambda: each(lambda g: g * jnp.asarray(np.full(g.shape, g.size, g.dtype))), False),
    "other wires": (lambda: each(lambda g: (g * 2) * (g + 1) if g.size > 30 else (g * 2) * (g * 2 + 1)), False),
    "loop": (lambda: each(lambda g: lax.fori_loop(0, g.shape[0], lambda i, x: x * 2, g)), False),
    "stop": (lambda: each(lambda g: lax.while_loop(lambda x: x.sum() < 10, lambda x: x * 2 + 1, g)), False),
    "branch": (lambda: each(lambda g: lax.cond(g.max() > 1, lambda x: x * 2, lambda x: x, g)), False),
    "first element": (lambda: each(lambda g: g * g.ravel()[0]), False),
    "rows": (lambda: each(lambda g: g / jnp.linalg.norm(g, axis=-1, keepdims=True)), False),
    "nan": (lambda: each(lambda g: jnp.where(g > 0, g, jnp.nan)), True),
    "unused": (lambda: each(unused_norm), True),
    "unused ones": (lambda: each(lambda g: g * jnp.max(jnp.ones_like(g))), True),
    "constants alike": (lambda: each(lambda g: g * jnp.asarray(np.arange(3.0, dtype=g.dtype)).sum()), True),
    "fixed loop": (lambda: each(lambda g: lax.fori_loop(0, 3, lambda i, x: x * 2 + i, g)), True),
    "scan": (lambda: each(lambda g: lax.scan(lambda x, y: (x * y, y), g, jnp.arange(3.0))[0]), True),
    "custom_jvp": (lambda: each(jax.nn.relu), True),
    "remat": (lambda: each(jax.checkpoint(lambda g: jnp.tanh(g) + 1)), True),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OTHERS))
def test_shapes_constants_and_loops(name):
    make, expected = OTHERS[name]
    case = Case(name, make)
    assert (differs(case) is None) == expected
    assert (refusal(case) is None) == expected


# The message.


def normalized(updates):
    return jax.tree.map(lambda g: g / jnp.sqrt(jnp.sum(g * g)), updates)


@jax.jit
def jitted_update(updates, state, params=None):
    return normalized(updates), state


class Whitening:
    """A user's own class: its `update` looks at rows."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return jax.tree.map(lambda g: g - jnp.mean(g), updates), state


def of_class():
    return optax.GradientTransformation(Whitening().init, Whitening().update)


SOME = {"blocks": True, "embed": True, "empty": False, "list": False, "odd": False, "scalar": False}
LABELS = {name: "a" if some else "b" for name, some in SOME.items()}


def clip():
    return optax.clip_by_global_norm(0.1)


def twice():
    return optax.scale(2.0)


def by_lamb():
    return optax.partition({"a": optax.lamb(0.1), "b": optax.sgd(0.1)}, LABELS)


def every_other(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


def of_function():
    return optax.GradientTransformation(lambda params: (), jitted_update)


NORM = "clip_by_global_norm (optax/transforms/_clipping.py:"
RATIO = "scale_by_trust_ratio (optax/_src/transform.py:"
FINITE = "apply_if_finite (optax/transforms/_conditionality.py:"
SM3 = "scale_by_sm3 (optax/_src/transform.py:"
MINE = "(tests/optimizer/test_elementwise.py:"
PLACES = {
    "alone": (clip, f"in {NORM}"),
    "chain": (lambda: optax.chain(twice(), clip()), f"in chain[1] > {NORM}"),
    "alias": (lambda: optax.chain(twice(), optax.lamb(0.1)), f"in chain[1] > chain[2] > {RATIO}"),
    "nested": (lambda: optax.chain(optax.chain(twice(), clip()), clip()), f"in chain[0] > chain[1] > {NORM}"),
    "named_chain": (lambda: optax.named_chain(("a", twice()), ("b", clip())), f"in named_chain[1] > {NORM}"),
    "masked": (lambda: optax.chain(optax.masked(clip(), SOME), twice()), f"in chain[0] > masked > {NORM}"),
    "partition": (by_lamb, f"in partition['a'] > masked > chain[2] > {RATIO}"),
    "MultiSteps": (lambda: every_other(optax.chain(clip(), twice())), f"in MultiSteps > chain[0] > {NORM}"),
    "inject": (
        lambda: optax.inject_hyperparams(optax.lamb)(learning_rate=lambda step: 0.1),
        f"in inject_hyperparams > chain > {RATIO}",
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(twice(), 2), f"in {FINITE}"),
    "two masks": (
        lambda: optax.chain(optax.masked(twice(), SOME), optax.masked(clip(), SOME)),
        f"in chain[1] > masked > {NORM}",
    ),
    "a function": (lambda: optax.chain(twice(), of_function()), f"in chain[1] > jitted_update > normalized {MINE}"),
    "a class": (lambda: optax.chain(of_class(), twice()), f"in chain[0] > Whitening {MINE}"),
    "raises": (
        lambda: optax.chain(twice(), optax.masked(optax.sm3(0.1), SOME)),
        f"in chain[1] > masked > chain[0] > {SM3}",
    ),
}


@pytest.mark.parametrize("name", list(PLACES))
def test_the_message_names_the_operation_and_its_place(name):
    make, place = PLACES[name]
    message = refusal(Case(name, make))
    assert place in message
    assert "it applies `reduce_" in message or "it cannot run on the shards" in message
    for word in ("outside shard_map", "ddp", "min_shard_size", "blocks/gain"):
        assert word in message


def test_two_that_cannot_be_told_apart_are_both_named():
    mask = dict.fromkeys(SOME, False)
    tx = optax.chain(optax.masked(clip(), mask), twice(), optax.masked(clip(), SOME))
    assert f"in chain[0 or 2] > masked > {NORM}" in refusal(Case("two", lambda: tx))


def test_what_fails_on_whole_leaves_fails_as_it_does_in_optax():
    with pytest.raises(IndexError, match="list index out of range"):
        refusal(Case("sm3", lambda: optax.sm3(0.1)))


def test_without_tracebacks_there_is_no_place():
    assert blame.of_equations((), optax.sgd(0.1)) == ""


def test_another_structure_is_refused():
    one = jax.make_jaxpr(lambda x: [x, x])(jnp.ones(2))
    results = [elementwise.Result("w", labels.SAME, (2,))]
    with pytest.raises(elementwise.NotElementwise, match="a different structure"):
        elementwise.check_elementwise(one, one, [labels.SAME], results, frozenset())
