"""A checkpoint knows whether its numbers are finite, and none that is not takes the place of the last that is."""

import json
import pathlib
import warnings
import zipfile

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.checkpoint import Best, Checkpointer
from jaxshard.checkpoint.storage import manifest
from jaxshard.cli import main

GOOD = {"params": {"w": jnp.ones((16, 8))}, "state": {"mu": jnp.zeros((16, 8)), "best": jnp.float32(jnp.inf)}}


def bad(path="w", value=jnp.nan, tree=GOOD):
    """The same with one element that is not finite."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: x.at[(-1,) * x.ndim].set(value) if keys[-1].key == path else x, tree
    )


def saved(folder, trees, **options):
    """A folder with steps 1, 2, ..."""
    with Checkpointer(folder, **options) as checkpoints:
        for step, tree in enumerate(trees, 1):
            checkpoints.save(step, tree, blocking=True)
    return Checkpointer(folder)


# What is saved.


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("path", ["w", "mu"])
def test_every_kind_of_leaf_and_number_is_named(tmp_path, path, value):
    checkpoints = saved(tmp_path, [GOOD, bad(path, value)])
    root, fault = "params" if path == "w" else "state", "nan" if value != value else "inf"
    kept = {"state/best": "inf"}  # an optimizer begins with it
    assert checkpoints.info(1)["not_finite"] == kept == checkpoints.verify(1)
    assert checkpoints.info(2)["not_finite"] == {f"{root}/{path}": fault, **kept} == checkpoints.verify(2)
    assert checkpoints.latest_finite() == 1
    words = f"{root}/{path} has {'NaN' if fault == 'nan' else 'infinite numbers'}"
    with pytest.warns(
        UserWarning, match=rf"checkpoint 2 is not finite: {words}; the newest finite one: restore\(.*step=1\)"
    ):
        assert checkpoints.restore(GOOD)[0] == 2


def test_of_a_part_only_the_part_is_told(tmp_path):
    checkpoints = saved(tmp_path, [bad("mu")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.restore(GOOD, only="^params/")
    with pytest.warns(UserWarning, match="checkpoint 1 is not finite: state/mu has NaN; no checkpoint here is finite"):
        checkpoints.restore(GOOD)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P("data", "tensor")])
def test_wherever_it_lies(tmp_path, dtype, spec):
    """On one device alone, too: the last element is that of the last part."""
    mesh = jaxshard.make_mesh(tensor=2)
    x = jax.device_put(jnp.ones((16, 8), dtype).at[-1, -1].set(jnp.nan), NamedSharding(mesh, spec))
    assert saved(tmp_path, [{"x": x}]).info(1)["not_finite"] == {"x": "nan"}


OPTIMIZERS = {
    "plateau": lambda: optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau()),
    "lbfgs": optax.lbfgs,
    "adamw": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optimizers_begin_with_is_finite(tmp_path, name):
    params = {"w": jnp.ones((4, 4))}
    assert saved(tmp_path, [{"params": params, "state": OPTIMIZERS[name]().init(params)}]).latest_finite() == 1


@pytest.mark.parametrize(
    "options", [{"moment_dtype": "int8"}, {"moment_dtype": "bfloat16"}, {"master_dtype": "float32"}]
)
def test_nan_under_narrow_options_shows(tmp_path, options):
    """In 8 bits the codes are whole numbers; a NaN is in the scales."""
    opt = jaxshard.zero2(optax.adamw(1e-3), jaxshard.make_mesh(), min_shard_size=1, **options)
    params = opt.place({"w": jnp.ones((128, 64), jnp.bfloat16 if "master_dtype" in options else jnp.float32)})
    state = opt.init(params)
    grads = jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), params)
    _, state = opt.update(grads, state, params)
    checkpoints = saved(tmp_path, [{"state": opt.init(params)}, {"state": state}])
    assert checkpoints.latest_finite() == 1
    assert "nan" in checkpoints.info(2)["not_finite"].values()


# What is kept.


@pytest.mark.parametrize(
    "options", [{"keep_last": 1}, {"keep_last": 2}, {"keep_last": 1, "keep_every": 7}, {"keep_best": Best("loss")}]
)
def test_the_last_finite_one_stays(tmp_path, options):
    """While a loop saves NaN over and over; once there is a newer finite one, the older goes."""
    with Checkpointer(tmp_path, **{"keep_last": 1} | options) as checkpoints:
        for step, tree in enumerate([GOOD, GOOD, *[bad()] * 4], 1):
            checkpoints.save(step, tree, metrics={"loss": -step}, blocking=True)
        assert checkpoints.latest_finite() == 2
        assert 2 in checkpoints.steps()
        assert 1 not in checkpoints.steps()
        with pytest.warns(UserWarning, match="step=2"):
            checkpoints.restore(GOOD)
        assert bool(jnp.isfinite(checkpoints.restore(GOOD, 2)[1]["params"]["w"]).all())
    with Checkpointer(tmp_path, **{"keep_last": 1} | options) as checkpoints:  # another run
        checkpoints.save(7, bad(), blocking=True)
        assert 2 in checkpoints.steps()
        checkpoints.save(8, GOOD, blocking=True)
        assert 2 not in checkpoints.steps()


def test_infinity_is_better_than_nan(tmp_path):
    """A mask of -inf in every checkpoint leaves the last one without NaN protected."""
    mask = {"mask": jnp.full((4,), -jnp.inf)}
    checkpoints = saved(tmp_path, [GOOD | mask, bad() | mask, bad() | mask], keep_last=1)
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.latest_finite() is None


def test_the_loop_of_the_docs_keeps_a_healthy_step(tmp_path):
    """An optimizer that makes NaN of finite gradients."""
    nan = optax.GradientTransformation(
        lambda params: jnp.int32(0),
        lambda grads, count, params=None: (
            jax.tree.map(lambda g: jnp.where(count >= 5, jnp.nan, 0.1) * g, grads),
            count + 1,
        ),
    )
    params, state = {"w": jnp.ones(8)}, nan.init(None)
    with Checkpointer(tmp_path) as checkpoints:
        for i in range(1, 12):
            updates, state = nan.update({"w": jnp.ones(8)}, state)
            params = optax.apply_updates(params, updates)
            checkpoints.save(i, {"params": params, "state": state})
        checkpoints.wait()
        assert checkpoints.latest_finite() == 5
        assert checkpoints.steps() == [5, 9, 10, 11]


# Older and newer.


def test_what_the_first_release_wrote_is_unknown_until_it_is_read(tmp_path, capsys):
    with zipfile.ZipFile(pathlib.Path(__file__).with_name("written_by_0.1.0.zip")) as written:
        written.extractall(tmp_path)
    checkpoints = Checkpointer(tmp_path / "saves")
    assert checkpoints.info(7)["not_finite"] is None
    assert checkpoints.verify(7) == {}
    assert checkpoints.latest_finite() is None
    assert main(["ckpt", "ls", str(tmp_path / "saves")]) == 0
    assert "unknown" in capsys.readouterr().out
    saved(tmp_path / "saves", [])
    with Checkpointer(tmp_path / "saves", keep_last=1) as checkpoints:
        checkpoints.save(8, bad(), blocking=True)
        checkpoints.save(9, bad(), blocking=True)
        assert checkpoints.steps() == [7, 9]  # it may be finite


def test_the_format_is_the_same_so_that_an_older_jaxshard_reads_it(tmp_path):
    saved(tmp_path, [bad()])
    text = json.loads((tmp_path / "1" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    assert text["format"] == 1
    assert text.pop("digest") == manifest.sealed(text)["digest"]  # of all that is there, known or not


@pytest.mark.parametrize("wrong", [{"no leaf": "nan"}, {"params/w": "zero"}, {"params/w": 7}, [], 7, "nan", None])
def test_a_manifest_that_says_what_no_leaf_is_is_corrupt(tmp_path, wrong):
    saved(tmp_path, [GOOD])
    path = tmp_path / "1" / "_CHECKPOINT_METADATA"
    whole = json.loads(path.read_text())
    del whole["custom_metadata"]["digest"]
    whole["custom_metadata"] = manifest.sealed(whole["custom_metadata"] | {"not_finite": wrong})
    path.write_text(json.dumps(whole))
    with pytest.raises(jaxshard.checkpoint.CorruptCheckpointError):
        Checkpointer(tmp_path).info(1)


def test_ckpt_shows_it(tmp_path, capsys):
    saved(tmp_path, [GOOD, bad()])
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert [" not finite" in line for line in capsys.readouterr().out.splitlines()[1:]] == [False, True]
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["step 1: intact", "step 2: intact, not finite: params/w has NaN"]
    assert main(["ckpt", "info", str(tmp_path)]) == 0
    assert "numbers: not finite: params/w has NaN" in capsys.readouterr().out
