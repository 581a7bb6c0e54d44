"""What is said of traced programs, beside what is measured by moving their inputs: generated programs of all kinds."""

import functools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.programs import questions
from jaxshard.programs.primitives import READS_KEYS

SIZE, INPUTS = 3, 4


@jax.custom_jvp
def through(x):
    """Rounds; its gradient is that of x (a straight-through estimator)."""
    return jnp.round(x)


through.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


@jax.custom_vjp
def clipped(x):
    """x, whose gradient is clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def diagonal_solve(a, b):
    """b / (1 + a**2), whose derivative is that of the system; the solver rounds."""
    d = 1 + a**2

    def solve(_, b):
        return lax.stop_gradient(b / d)

    return lax.custom_linear_solve(lambda x: d * x, b, solve, symmetric=True)


PLAIN = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (2.0 + b * b),
    "sin": lambda a, b: jnp.sin(a),
    "neg": lambda a, b: -a,
    "square": lambda a, b: a * a,
    "abs": lambda a, b: jnp.abs(a),
    "exp": lambda a, b: jnp.exp(-jnp.abs(a)),
    "max": jnp.maximum,
    "floor": lambda a, b: jnp.floor(3 * a),
    "stopped": lambda a, b: lax.stop_gradient(a),
    "compared": lambda a, b: 1.0 * (a > b),
    "chosen": lambda a, b: jnp.where(a > 0, a, b),
    "cast": lambda a, b: (8 * a).astype(jnp.int32).astype(a.dtype),
    "turned": lambda a, b: jnp.roll(a, 1),
    "sum": lambda a, b: jnp.sum(a) * b,
    "copied": lambda a, b: a.reshape(1, SIZE).reshape(SIZE),
    "indexed": lambda a, b: a[jnp.argmax(b)] + 0 * b,
    "pair": lambda a, b: jnp.concatenate([a[:1], b[1:]]),
    "solve": diagonal_solve,
    "through": lambda a, b: through(a),
    "clipped": lambda a, b: clipped(a),
    "nothing": lambda a, b: a,
    "constant": lambda a, b: jnp.linspace(0.5, 1.5, SIZE),
}


def generated(seed, names, without=()):
    """A random program of INPUTS arrays, which returns four: operations, in loops, branches and calls of all kinds."""
    chosen = random.Random(seed)

    def block(depth):
        """A function of a list of arrays to as many."""
        steps = [step(depth) for _ in range(chosen.choice([1, 2, 2, 3]))]
        return lambda xs: functools.reduce(lambda ys, one: one(ys), steps, xs)

    def step(depth):
        kinds = ["plain"] * 5 + [kind for kind in WRAPPED if kind not in without] * (depth > 0)
        kind = chosen.choice(kinds)
        if kind == "plain":
            a, b, to, name = *(chosen.randrange(INPUTS) for _ in range(3)), chosen.choice(names)
            return lambda xs: [*xs[:to], PLAIN[name](xs[a], xs[b]), *xs[to + 1 :]]
        order = chosen.sample(range(INPUTS), INPUTS)
        first, second, by = block(depth - 1), block(depth - 1), chosen.randrange(INPUTS)

        def turned(xs):
            ys = first(xs)
            return [ys[i] for i in order]

        return functools.partial(_wrapped, kind, turned, second, by)

    return block(2)


WRAPPED = ["jit", "remat", "scan", "scan of elements", "while", "fori", "cond", "custom_jvp", "custom_vjp", "shard_map"]


def _wrapped(kind, first, second, by, xs):
    if kind == "jit":
        return jax.jit(first)(xs)
    if kind == "remat":
        return jax.checkpoint(first)(xs)
    if kind == "scan":
        return lax.scan(lambda carry, _: (first(carry), None), xs, None, length=2)[0]
    if kind == "scan of elements":
        carry, ys = lax.scan(lambda c, x: (first([c[0] + x, *c[1:]]), c[1]), xs, jnp.stack(xs[:2]))
        return [*carry[:3], ys[1]]
    if kind == "while":
        return lax.while_loop(lambda c: c[0] < 2 + (xs[by][0] > 0), lambda c: (c[0] + 1, first(c[1])), (0, xs))[1]
    if kind == "fori":
        return lax.fori_loop(0, 2, lambda _, c: first(c), xs)
    if kind == "cond":
        return lax.cond(xs[by][0] > 0, first, second, xs)
    if kind == "shard_map":
        if not jax.sharding.get_abstract_mesh().empty:  # inside another one
            return first(xs)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
        return jax.shard_map(first, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(xs)
    if kind == "custom_jvp":
        rule = jax.custom_jvp(first)
        rule.defjvp(lambda xs, ts: (first(*xs), jax.tree.map(lambda t: 2 * t, jax.jvp(first, xs, ts)[1])))
    else:
        rule = jax.custom_vjp(first)
        rule.defvjp(lambda xs: (first(xs), xs), lambda xs, gs: jax.tree.map(lambda g: 3 * g, jax.vjp(first, xs)[1](gs)))
    return rule(xs)


def inputs(seed, positive=()):
    xs = np.random.default_rng(seed).normal(size=(INPUTS, SIZE))
    return [jnp.asarray(abs(x) if i in positive else x) for i, x in enumerate(xs)]


def moves(run, xs, seeds=range(4)):
    """moves[i][o]: whether output o was seen to change with input i."""
    seen = np.zeros((INPUTS, INPUTS), bool)
    for seed in seeds:
        base = [np.asarray(x) for x in run(xs)]
        for i, other in enumerate(inputs(100 + seed)):
            after = run([*xs[:i], other, *xs[i + 1 :]])
            seen[i] |= [not np.array_equal(a, b, equal_nan=True) for a, b in zip(base, after, strict=True)]
    return seen


def only(i):
    return [j == i for j in range(INPUTS)]


def check_said(name, i, said, seen, found):
    """Whatever was seen of input i is said; counts both."""
    assert not any(one and not yes for one, yes in zip(seen, said, strict=True)), (i, said, seen)
    found[f"{name}, seen"] += int(sum(seen))
    found[f"{name}, said"] += sum(said)


def check_depends(fn, program, found):
    seen = moves(jax.jit(fn), inputs(1))
    for i in range(INPUTS):
        check_said("depends", i, questions.depends(program, only(i)), seen[i], found)


def check_smooth(fn, program, found):
    def gradients(xs):
        """Of each output, with respect to each input."""
        outs, pull = jax.vjp(fn, xs)
        one_hot = [jnp.zeros((INPUTS, SIZE)).at[o].set(1 + jnp.arange(SIZE)) for o in range(len(outs))]
        return jax.vmap(pull)(one_hot)[0]

    try:
        run = jax.jit(gradients)
        seen = np.any([[np.any(np.asarray(g) != 0, 1) for g in run(inputs(seed))] for seed in range(3)], 0)
    except ValueError:  # no reverse mode of a while loop
        return
    for i in range(INPUTS):
        check_said("smooth", i, questions.varies_smoothly(program, only(i)), seen[i], found)


def check_hands_on(fn, program, found):
    outs = [np.asarray(x) for x in jax.jit(fn)(inputs(5))]
    for i, x in enumerate(inputs(5)):
        same = [bool(np.isin(np.asarray(x), out).any()) for out in outs]
        check_said("handed on", i, questions.hands_on(program, only(i)), same, found)


def check_never_negative(fn, program, found):
    marks = [True, True, False, False]
    said = questions.never_negative(program, marks)
    for seed in range(6):
        outs = jax.jit(fn)(inputs(seed, positive=(0, 1)))
        below = [bool(jnp.any(out < 0)) for out in outs]
        assert not any(yes and is_below for yes, is_below in zip(said, below, strict=True)), (said, below)
    found["never negative, said"] += sum(said)


def check_linear(fn, program, found):
    """Affine in the marked inputs, where nothing is clipped and no number scales."""
    said = questions.linear(program, [1, 1, 0, 0])
    a, b, zero = inputs(1), inputs(2), [jnp.zeros(SIZE)] * 2
    run = jax.jit(lambda xs: fn([*xs, *a[2:]]))
    both = run([x + y for x, y in zip(a[:2], b[:2], strict=True)])
    for degree, f_a, f_b, f_0, f_both in zip(said, run(a[:2]), run(b[:2]), run(zero), both, strict=True):
        if degree == 0:
            assert jnp.array_equal(f_a, f_b)
        if degree == 1:
            assert jnp.allclose(f_both + f_0, f_a + f_b, atol=1e-9)
        found[f"degree {degree}"] += 1


MOVING = ("turned", "copied", "pair", "chosen", "max", "neg", "nothing", "stopped", "clipped", "sin", "exp", "solve")
SMOOTH_NAMES = tuple(PLAIN.keys() - {"max", "abs", "exp", "chosen", "sum", "indexed", "through", "compared", "cast"})
QUESTIONS = {
    "depends": (check_depends, tuple(PLAIN)),
    "smooth": (check_smooth, tuple(PLAIN)),
    "hands on": (check_hands_on, MOVING),  # others give some numbers back: x + 0, 1 * x, (x + y) - y
    "never negative": (check_never_negative, tuple(PLAIN)),
    "linear": (check_linear, tuple(sorted(SMOOTH_NAMES))),
}


def asked(name, seeds):
    """Asks generated programs one question; returns how often each answer came."""
    check, names = QUESTIONS[name]
    without = {
        "linear": ("cond", "while"),  # a number that chooses counts as one that scales
        "hands on": ("scan of elements",),  # adds them
    }.get(name, ())
    found = Counter()
    with jax.enable_x64(True):
        for seed in seeds:
            fn = generated(seed, names, without)
            try:
                check(fn, jax.make_jaxpr(fn)(inputs(0)), found)
            except AssertionError as error:
                raise AssertionError(f"{name} of program {seed}: {error}") from error
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_answer_is_on_the_unsafe_side(name):
    found = asked(name, range(12))
    assert all(found.values())
    assert found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", QUESTIONS)
def test_no_answer_of_many_is_on_the_unsafe_side(name):
    print(dict(asked(name, range(1000, 1500))))


# What was wrong once.


def key_of_the_turn_before(loop):
    def f(key):
        def body(carry):
            now, before, total = carry
            return now, now, total + jax.random.normal(jax.random.wrap_key_data(before))

        start = (key, jnp.zeros_like(key), 0.0)
        if loop == "scan":
            return lax.scan(lambda carry, _: (body(carry), None), start, None, length=2)[0][2]
        if loop == "while":
            return lax.while_loop(lambda c: c[2] == 0, body, start)[2]
        return lax.fori_loop(0, 2, lambda _, carry: body(carry), start)[2]

    return f


@pytest.mark.parametrize("loop", ["scan", "while", "fori"])
def test_a_key_that_a_later_turn_reads_is_one(loop):
    program = jax.make_jaxpr(key_of_the_turn_before(loop))(jax.random.key_data(jax.random.key(0)))
    assert questions.reaches(program, READS_KEYS, [True]) == [True]


@pytest.mark.parametrize("rule", [through, clipped])
def test_a_rule_of_ones_own_may_give_a_gradient(rule):
    program = jax.make_jaxpr(lambda x: (rule(x), lax.stop_gradient(rule(x)), jnp.round(x)))(1.0)
    assert questions.varies_smoothly(program, [True]) == [True, False, False]


def test_each_device_has_another_index_inside_a_call_too():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def f(x):
        @jax.checkpoint
        def inner(x):
            zero = lax.pcast(0, ("data",), to="varying")
            return lax.cond(x.sum() > 0, lambda: lax.axis_index("data"), lambda: zero)

        return inner(x)[None]

    program = jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("data")))(jnp.ones(2))
    assert questions.depends(program, [False]) == [True]


def through_a_ref(x, y):
    ref = jax.new_ref(jnp.zeros(3))
    before = ref[...]
    ref[...] = x
    once = ref[...]
    lax.fori_loop(0, 2, lambda i, c: _added(ref, i, y, c), 0)
    return before, once, jax.freeze(ref)


def _added(ref, i, y, c):
    ref[i] = ref[i] + y[i]
    return c


def test_what_is_written_to_a_mutable_array_is_read_from_it():
    program = jax.make_jaxpr(through_a_ref)(jnp.ones(3), jnp.ones(3))
    for mark, wanted in (([True, False], [False, True, True]), ([False, True], [False, False, True])):
        assert questions.depends(program, mark) == wanted
        assert questions.varies_smoothly(program, mark) == wanted
        assert questions.hands_on(program, mark) == wanted
        assert [x > 0 for x in questions.linear(program, [*map(int, mark)])] == wanted


def test_squares_of_elements_one_by_one_are_not_linear():
    program = jax.make_jaxpr(lambda g: (lax.map(lambda x: x * x, g), lax.map(lambda x: 2 * x, g)))(jnp.ones(3))
    assert questions.linear(program, [1]) == [2, 1]
