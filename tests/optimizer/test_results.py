"""What a stranger's optimizer returns: updates that do not fit the params, and states of odd kinds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard


@jax.tree_util.register_pytree_node_class
class Strict:
    """A node that takes arrays alone."""

    def __init__(self, value):
        if not hasattr(value, "shape"):
            raise ValueError("an array, please")
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
PARAMS = {"b": np.ones((3,), np.float32), "w": np.ones((16, 3), np.float32)}
BATCH = np.ones((16, 16), np.float32)
REFUSED = {
    "smaller": (lambda u: {**u, "w": u["w"][:3]}, ValueError, r"of w has shape \(3, 3\), and .* has \(16, 3\)"),
    "larger": (lambda u: {**u, "b": u["w"]}, ValueError, r"of b has shape \(16, 3\), and .* has \(3,\)"),
    "too few": (lambda u: {"w": u["w"]}, ValueError, "b is missing"),
    "too many": (lambda u: {**u, "z": u["w"]}, ValueError, "z is not a parameter"),
    "none": (lambda u: {**u, "w": None}, ValueError, "w is missing"),
    "a list": (lambda u: list(u.values()), ValueError, "b is missing"),
    "text": (lambda u: {**u, "w": "x"}, TypeError, "of w is of type str"),
}
BROADCAST = {
    "a row": lambda u: {**u, "w": u["w"][:1]},
    "an array of no dims": lambda u: {**u, "w": jnp.float32(0.5)},
    "a number": lambda u: {**u, "w": 0.5},
    "whole numbers": lambda u: {**u, "w": jnp.ones((16, 3), int)},
}


def returning(fn, init=lambda p: optax.EmptyState()):
    return optax.GradientTransformation(init, lambda updates, state, params=None: (fn(updates), state))


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def sharded(strategy, tx):
    mesh = jaxshard.make_mesh(data=4, replica=2) if strategy == "hsdp" else jaxshard.make_mesh()
    return getattr(jaxshard, strategy)(tx, mesh, min_shard_size=2)


def train(opt):
    return jaxshard.train_step(loss, opt)(opt.place(PARAMS), opt.init(PARAMS), BATCH)[0]


def update(opt):
    return opt.update(PARAMS, opt.init(PARAMS), opt.place(PARAMS))[0]


def jitted(opt):
    return jax.jit(opt.update)(opt.place(PARAMS), opt.init(PARAMS), opt.place(PARAMS))[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(REFUSED))
def test_an_update_that_does_not_fit_is_refused(name, strategy):
    fn, error, words = REFUSED[name]
    opt = sharded(strategy, returning(fn))
    for run in (train, update, jitted):
        with pytest.raises(error, match=words):
            run(opt)


def test_an_update_without_a_state_is_refused():
    alone = optax.GradientTransformation(lambda p: (), lambda updates, state, params=None: updates)
    with pytest.raises(TypeError, match=r"must return \(updates, state\), not dict"):
        train(sharded("zero2", alone))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("name", list(BROADCAST))
def test_an_update_is_broadcast(name, strategy):
    tx = returning(BROADCAST[name])
    opt = sharded(strategy, tx)
    plain = optax.apply_updates(PARAMS, tx.update(jax.grad(loss)(PARAMS, BATCH), tx.init(PARAMS), PARAMS)[0])
    chex.assert_trees_all_close(train(opt), plain, rtol=1e-5)
    assert update(opt)["w"].shape == (16, 3)


@pytest.mark.parametrize("leaf", ["adam", len, np.array(["a"]), jnp.float32], ids=["text", "fn", "texts", "dtype"])
def test_a_state_of_other_things_is_refused(leaf):
    with pytest.raises(TypeError, match=r"init: a of the optimizer's state is of type .*, neither an array nor"):
        sharded("zero2", returning(lambda u: u, lambda p: {"a": leaf})).init(PARAMS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_none(strategy):
    opt = sharded(strategy, returning(lambda u: u, lambda p: None))
    assert opt.init(PARAMS) is None
    assert train(opt)["w"].shape == (16, 3)


@pytest.mark.parametrize("kind", ["NumPy's", "on one device", "placed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_concrete_arrays_in_a_trace_need_no_state(strategy, kind):
    """A state without leaves does not tell that the copied params are traced."""
    opt = sharded(strategy, returning(lambda u: u))
    give = {"NumPy's": lambda p: p, "on one device": lambda p: jax.tree.map(jnp.asarray, p), "placed": opt.place}[kind]
    params = give(PARAMS)
    got = jax.jit(lambda: opt.update(params, opt.init(params), opt.place(params))[0])()
    chex.assert_trees_all_equal(got, PARAMS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_that_takes_arrays_alone_is_refused_with_the_cure(strategy):
    told = r"cannot be rebuilt.*ValueError: an array, please\nIts tree_unflatten must create the node without checks"
    with pytest.raises(TypeError, match=told):
        sharded(strategy, optax.adam(0.1)).place({"w": Strict(PARAMS["w"])})
    with pytest.raises(TypeError, match=told):
        sharded(strategy, returning(lambda u: u, lambda p: Strict(jnp.zeros((16,))))).init(PARAMS)
