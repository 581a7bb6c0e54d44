"""What a loss could save is told: whole params that stay for the backward pass, marks and policies without effect."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard.loss import advice

WIDTH, LAYERS = 768, 5
PARAMS = {f"layer{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
BATCH = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)
POLICIES = jax.checkpoint_policies


def model(*, mark=lambda w: w, remat=False, policy=None, cast=None):
    def layer(w, x):
        w = mark(w)
        return jnp.tanh(x @ (w if cast is None else w.astype(cast)))

    layer = jax.checkpoint(layer, policy=policy) if remat else layer

    def loss(params, x):
        for w in params.values():
            x = layer(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def step_of(loss, strategy="zero3", **options):
    opt = getattr(jaxshard, strategy)(optax.sgd(0.1, momentum=0.9), jaxshard.make_mesh(), **options)
    return jaxshard.train_step(loss, opt), opt


def told(loss, strategy="zero3", params=PARAMS, batch=BATCH, **options):
    """(the warnings of a trace, the layout's line about what is kept)."""
    step, opt = step_of(loss, strategy, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        placed = opt.place(params)
        step.trace(placed, opt.init(placed), batch)
    kept = [line for line in str(step.layout(params, batch)).splitlines() if line.startswith("kept: ")]
    return [str(one.message) for one in found], "".join(kept)


def test_a_newcomer_is_told_once_what_stays_whole_with_line_and_cure():
    found, kept = told(model())
    assert len(found) == 1
    assert kept == f"kept: {found[0]}"
    for words in ("11.8 MB", f"{LAYERS} params", "test_advice.py:", 'regather="backward"', "jaxshard.unshard(w)"):
        assert words in kept


def test_what_the_author_marks_without_a_remat_is_a_line_of_the_layout_alone():
    found, kept = told(model(mark=jaxshard.unshard))
    assert found == []
    assert "11.8 MB" in kept


def test_bytes_are_those_of_the_dtype_in_which_params_are_gathered():
    _, kept = told(model(cast=jnp.bfloat16))
    assert "5.9 MB" in kept


@pytest.mark.parametrize(
    ("loss", "strategy", "options"),
    [
        (model(), "zero2", {}),
        (model(), "ddp", {}),
        (model(), "zero3", {"regather": "backward"}),
        (model(), "zero3", {"regather": "step"}),
        (model(mark=jaxshard.unshard, remat=True), "zero3", {}),
        (model(mark=jaxshard.unshard, remat=True, policy=POLICIES.dots_saveable), "zero3", {}),
    ],
)
def test_nothing_is_told_where_nothing_stays(loss, strategy, options):
    assert told(loss, strategy, **options) == ([], "")


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_what_a_policy_saves_by_name_is_a_line_of_the_layout_alone(strategy):
    policy = POLICIES.save_only_these_names("jaxshard.unshard")
    found, kept = told(model(mark=jaxshard.unshard, remat=True, policy=policy), strategy)
    assert found == []
    assert "11.8 MB" in kept
    assert 'regather="backward" does not gather params again' in kept


def test_small_models_and_params_that_only_linear_operations_use_are_not_warned_of():
    small = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "ab"}
    found, kept = told(lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2), params=small, batch=np.ones((8, 256), "f"))
    assert found == []
    assert "2 params" in kept
    biases = {"b": jax.ShapeDtypeStruct((2**22,), jnp.float32)}
    assert told(lambda p, x: jnp.mean((x + p["b"][:256]) ** 2), params=biases, batch=np.ones((8, 256), "f")) == ([], "")


def test_one_large_param_is_whole_at_some_time_anyway():
    head = {"head": jax.ShapeDtypeStruct((256, 2**16), jnp.float32)}
    assert told(lambda p, x: jnp.mean((x @ p["head"]) ** 2), params=head, batch=np.ones((8, 256), "f")) == ([], "")


def test_regather_has_something_to_gather():
    small = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
    found, _ = told(loss, params=small, batch=np.ones((8, 4), "f"), regather="backward")
    assert [text for text in found if 'regather="backward" has no effect' in text and "min_shard_size" in text]


def test_a_policy_names_marks_that_are_there():
    typo = POLICIES.save_only_these_names("jaxshard.unshrad")
    found, _ = told(model(mark=jaxshard.unshard, remat=True, policy=typo))
    assert len(found) == 1
    assert '"jaxshard.unshrad"' in found[0]
    assert "test_advice.py:" in found[0]
    both = POLICIES.save_from_both_policies(POLICIES.dots_saveable, typo)
    assert told(model(mark=jaxshard.unshard, remat=True, policy=both))[0] == found
    named = POLICIES.save_only_these_names("jaxshard.unshard")
    assert [text for text in told(model(remat=True, policy=named))[0] if 'names "jaxshard.unshard", which no' in text]


def test_jax_s_policy_that_ignores_its_names_is_told_of():
    policy = POLICIES.save_anything_except_these_names("jaxshard.unshard")
    found, _ = told(model(mark=jaxshard.unshard, remat=True, policy=policy))
    assert (len(found) == 1) == policy("any primitive", name="jaxshard.unshard")
    assert all('regather="backward"' in text for text in found)


def test_policies_of_any_kind_are_asked_in_safety():
    def knows_products_alone(primitive, *_, **how):
        return "lhs" in how["dimension_numbers"]  # raises for any other operation

    def recursive(primitive, *_, **how):
        return primitive is recursive or unset is None

    if jax.devices() == []:
        unset = None  # so that its cell is empty

    class Chosen:
        def __init__(self):
            self.policy, self.name, self.itself = POLICIES.dots_saveable, "jaxshard.anything", self

        def __call__(self, primitive, *_, **how):
            return False

    for policy in (knows_products_alone, recursive, functools.partial(POLICIES.dots_saveable), Chosen()):
        loss = model(remat=True, policy=policy)
        text = advice.idle_policy(jax.make_jaxpr(loss)(PARAMS, BATCH))
        assert ('"jaxshard.anything"' in text) == isinstance(policy, Chosen)
