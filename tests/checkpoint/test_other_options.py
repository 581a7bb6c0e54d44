"""A run goes on under other options of its strategy: what was saved is converted, with a warning that says so."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_same_bits

import jaxshard
from jaxshard.checkpoint import Checkpointer
from jaxshard.optimizer import eight_bits

WIDE, NARROW = jnp.float32, jnp.bfloat16
OPTIONS = {
    "plain": (WIDE, {}),
    "masters": (NARROW, {"master_dtype": WIDE}),
    "moments": (WIDE, {"moment_dtype": NARROW}),
    "int8": (WIDE, {"moment_dtype": "int8"}),
    "scale": (WIDE, {"loss_scale": jaxshard.LossScale(initial=2.0**10)}),
    "all": (NARROW, {"master_dtype": WIDE, "moment_dtype": "int8", "loss_scale": jaxshard.LossScale()}),
}


def optimizer(name, tx=None, devices=4, **others):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:devices])
    return jaxshard.zero2(tx or optax.adamw(1e-2), mesh, min_shard_size=1, **OPTIONS[name][1] | others)


def start(name, opt):
    rng = np.random.default_rng(0)
    shapes = {"w": (128, 64), "b": (64,)}
    return opt.place({key: jnp.asarray(rng.normal(size=shape), OPTIONS[name][0]) for key, shape in shapes.items()})


def trained(name, tx=None):
    """Params and state after a few updates; a loss scale, which only `train_step` takes along, is put in at the end."""
    opt = optimizer(name, tx, loss_scale=None)
    params = start(name, opt)
    state = opt.init(params)
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: jnp.sin(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + i), params)
        updates, state = opt.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    if scale := OPTIONS[name][1].get("loss_scale"):
        extra = getattr(state, "extra", {}) | {"loss_scale": scale.start()}
        state = jaxshard.ShardedState(getattr(state, "inner", state), extra)
    return {"params": params, "state": state, "n": 3}


def template(name, tx=None, shapes=False):
    opt = optimizer(name, tx, devices=8 if shapes else 4)
    params = start(name, opt)
    if shapes:
        params = opt.place(jax.eval_shape(lambda: params))
    return {"params": params, "state": opt.init(params), "n": 0}


def inner(tree):
    state = tree["state"]
    return state.inner if isinstance(state, jaxshard.ShardedState) else state


def real(tree):
    """Moments as float32 numbers, by path."""
    state, found = tree["state"], {}
    scales = state.extra.get("scale", {}) if isinstance(state, jaxshard.ShardedState) else {}
    flat_scales = {jax.tree_util.keystr(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(scales)}
    for keys, x in jax.tree_util.tree_leaves_with_path(inner(tree)):
        last = jax.tree_util.keystr(keys, simple=True, separator="/").split("/")[-2:]
        scale = [y for path, y in flat_scales.items() if all(f"'{part}'" in path for part in last)]
        found["/".join(last)] = np.asarray(eight_bits.decode(x, scale[0]) if scale else x, np.float32)
    return found


@pytest.mark.parametrize(
    ("before", "after", "shapes"), [(*two, i % 2 == 0) for i, two in enumerate(itertools.permutations(OPTIONS, 2))]
)
def test_every_option_goes_on_under_every_other(tmp_path, before, after, shapes):
    saved, wanted = trained(before), template(after, shapes=shapes)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, saved, blocking=True)
        with pytest.warns(UserWarning, match="checkpoint 3 was saved with different options"):
            step, found = checkpoints.restore(wanted)
    assert (step, found["n"]) == (3, 3)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not isinstance(want, int):
            assert (x.shape, x.dtype, x.sharding) == (want.shape, want.dtype, want.sharding)
    check_numbers(saved, found)
    if "loss_scale" not in OPTIONS[after][1]:
        params, opt = found["params"], optimizer(after, devices=8 if shapes else 4)
        opt.update(jax.tree.map(jnp.ones_like, params), found["state"], params)


def check_numbers(saved, found):
    wide = saved["state"].extra["master"] if "master" in getattr(saved["state"], "extra", {}) else saved["params"]
    for key, x in wide.items():
        assert np.array_equal(found["params"][key], np.asarray(x.astype(found["params"][key].dtype)))
        if "master" in getattr(found["state"], "extra", {}):
            assert np.array_equal(found["state"].extra["master"][key], np.asarray(x.astype(WIDE)))
    one, two = real(saved), real(found)
    assert one.keys() == two.keys()
    coarse = any(x.dtype in (jnp.int8, jnp.uint8) for x in jax.tree.leaves(inner(found)))
    for name, x in one.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(two[name], x, rtol=0.07 if coarse else 2**-8, atol=largest * 2**-15 if coarse else 0)


def test_what_is_converted_is_named(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, trained("plain"), blocking=True)
        said = str(heard(checkpoints, template("all"))[0].message)
    for words in (
        "masters are made from the saved params",
        "saved in float32 are now int8",
        "loss_scale: it starts at 32768",
    ):
        assert words in said


def test_there_and_back_is_the_same_bits(tmp_path):
    saved = trained("plain")
    for i, name in enumerate(("scale", "plain")):
        with Checkpointer(tmp_path / str(i)) as checkpoints:
            checkpoints.save(3, saved, blocking=True)
            with pytest.warns(UserWarning, match="different options"):
                saved = checkpoints.restore(template(name))[1]
    first = trained("plain")
    assert_same_bits((saved["params"], saved["state"]), (first["params"], first["state"]))


@pytest.mark.parametrize(
    "tx",
    [
        lambda: optax.sgd(1e-2, momentum=0.9),
        lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
        lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
        lambda: optax.multi_transform({"a": optax.adamw(1e-2), "b": optax.sgd(1e-2)}, {"w": "a", "b": "b"}),
    ],
)
def test_of_another_optimizer_the_part_that_fits_is_named_and_can_be_taken(tmp_path, tx):
    with Checkpointer(tmp_path) as checkpoints:
        saved = trained("plain")
        checkpoints.save(3, saved, blocking=True)
        wanted = template("plain", tx())
        with pytest.raises(ValueError, match="does not fit the template") as raised:
            checkpoints.restore(wanted)
        said = str(raised.value)
        assert "params/ fits (2 leaves): restore(template, only='^params/') restores it" in said
        assert "of state/ " in said
        _, found = checkpoints.restore(wanted, only="^params/")
        assert_same_bits(found["params"], saved["params"])


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(("plain", "moments", "int8"), 2)])
def test_a_part_is_converted_as_the_whole(tmp_path, before, after):
    saved, wanted = trained(before), template(after)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, saved, blocking=True)
        with pytest.warns(UserWarning, match="moment_dtype: moments saved in"):
            part = checkpoints.restore(wanted, only="^state/")[1]
        with pytest.warns(UserWarning, match="checkpoint 3 was saved with different options"):
            whole = checkpoints.restore(wanted)[1]
    assert_same_bits(part["state"], whole["state"])
    assert_same_bits(part["params"], wanted["params"])


def test_a_part_that_lacks_what_is_needed_is_refused(tmp_path):
    """Codes without their scales, masters without their params."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, trained("int8"), blocking=True)
        with pytest.raises(ValueError, match="does not fit the template"):
            checkpoints.restore(template("plain"), only="(state|inner)/0/mu/w$")
        with pytest.raises(ValueError, match="does not fit the template"):
            checkpoints.restore(template("masters"), only="^state/")


def test_where_moments_lie_in_a_chain_that_was_wrapped(tmp_path):
    wrapped = optax.inject_hyperparams(optax.adamw)(1e-2)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, trained("plain", wrapped), blocking=True)
        with pytest.raises(
            ValueError, match="state/0/count may be the checkpoint's state/inner_state/0/count "
        ) as raised:
            checkpoints.restore(template("plain"))
        assert "params/ fits (2 leaves)" in str(raised.value)
        checkpoints.save(4, trained("plain"), blocking=True)
        with pytest.raises(ValueError, match="state/inner_state/0/count may be the checkpoint's state/0/count"):
            checkpoints.restore(template("plain", wrapped))
        with pytest.raises(ValueError, match=r"does not fit the template((?!may be the checkpoint).)*$"):
            checkpoints.restore(template("plain", optax.sgd(1e-2)))  # nothing of it lies elsewhere


def test_the_learning_rate_of_the_checkpoint_is_told(tmp_path):
    """It goes on, although the program has another one now."""

    def made(rate):
        return template("plain", optax.inject_hyperparams(optax.adamw)(rate))

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, made(1e-2), blocking=True)
        with pytest.warns(
            UserWarning, match=r"learning_rate is 0.01 in checkpoint 3, and this value is kept; .*program has 0.003"
        ):
            found = checkpoints.restore(made(3e-3))[1]
        assert float(found["state"].hyperparams["learning_rate"]) == np.float32(1e-2)
        assert not heard(checkpoints, made(1e-2))


def test_a_scheduled_rate_is_not_told(tmp_path):
    def made():
        return template("plain", optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 10)))

    saved = made()
    saved["state"].hyperparams["learning_rate"] = jnp.float32(0.5)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, saved, blocking=True)
        assert not heard(checkpoints, made())


def heard(checkpoints, wanted):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpoints.restore(wanted)
    return found
