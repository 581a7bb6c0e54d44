"""The paths for GPUs and TPUs, on simulated devices: a loss whose backward pass is ordered equals plain optax on one.

There the order of products, picks and rematerialization has rules of its own, leaves are cut on other dims, and stacks
of layers are gathered over the old ones. Each rule's bug was planted once; the last tests plant them again.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close, batches, distances, hostile_params, model_loss, one_device, sharded

import jaxshard
from jaxshard import collectives
from jaxshard.collectives import global_view
from jaxshard.loss import ordered
from jaxshard.loss.params.unshard import Sharded
from jaxshard.optimizer import update
from jaxshard.optimizer.optimizer import setup_of
from jaxshard.platforms import backward

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning"),
    pytest.mark.usefixtures("x64", "as_on_gpu"),
]


@pytest.fixture
def as_on_gpu(as_on):
    """What the code does on GPUs, on these devices."""
    as_on("gpu")


def sgd():
    """Made anew for each optimizer: layouts are cached by it, and the same one may lie as on CPU in other tests."""
    return optax.sgd(0.1, momentum=0.9)


def opt_of(strategy, n=4, tx=None, **options):
    mesh = jaxshard.make_mesh(devices=jax.devices()[:n])
    return getattr(jaxshard, strategy)(tx or sgd(), mesh, min_shard_size=1, **options)


# The model of all strategies.


@pytest.mark.parametrize(
    ("strategy", "n", "microbatches"),
    [("ddp", 4, 1), ("zero1", 8, 1), *[(s, n, 1) for s in ("zero2", "zero3") for n in (1, 2, 3, 8)], ("zero3", 4, 3)],
)
def test_equals_one_device(strategy, n, microbatches):
    params, steps = hostile_params(np.float64), batches(3)
    want = one_device(model_loss, sgd(), params, steps)
    got = sharded(model_loss, opt_of(strategy, n), params, steps, microbatches=microbatches)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@jax.custom_jvp
def rounded(x):
    """Rounds; its gradient is that of x (a straight-through estimator)."""
    return jnp.round(x)


rounded.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_gradient_goes_straight_through_what_rounds_at_the_end_of_a_layer(strategy):
    def loss(p, batch):
        def layer(x, w):
            return rounded(8 * jnp.tanh(x @ jaxshard.unshard(w))) / 8, None

        def body(x, w):
            return jax.checkpoint(lambda x, w: (rounded(layer(x, w)[0] * 8), None))(x, w)

        return jnp.mean(lax.scan(body, batch, p["w"])[0] ** 2)

    rng = np.random.default_rng(0)
    params, steps = {"w": rng.normal(size=(3, 8, 8))}, [rng.normal(size=(8, 8)) for _ in range(3)]
    want = one_device(loss, sgd(), params, steps)
    got = sharded(loss, opt_of(strategy), params, steps)
    assert not np.array_equal(want[0]["w"], params["w"])
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


# Tensor axes, where types are checked: a barrier gives all that it holds the widest type.


def tensor_loss(p, batch):
    def layer(x, block):
        block = jaxshard.unshard(block)
        hidden = jnp.tanh(jaxshard.tensor.column_parallel(x * block["gain"], block["up"]))
        return x + jaxshard.tensor.row_parallel(hidden, block["down"]), None

    x, _ = lax.scan(jax.checkpoint(layer), batch["x"], p["blocks"])
    hidden = jaxshard.tensor.column_parallel(x, p["up"])
    return jnp.mean(jnp.square(jaxshard.tensor.row_parallel(hidden, p["down"]) @ p["head"] - batch["y"]))


@pytest.mark.parametrize(("zero", "microbatches"), [(0, 1), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_with_a_tensor_axis(zero, microbatches):
    rng = np.random.default_rng(2)
    blocks = {"gain": (3, 8), "up": (3, 8, 16), "down": (3, 16, 8)}
    shapes = {"blocks": blocks, "up": (8, 16), "down": (16, 8), "head": (8, 8)}
    params = jax.tree.map(lambda s: 0.3 * rng.normal(size=s), shapes, is_leaf=lambda x: isinstance(x, tuple))
    specs = [(r"up$", P(None, "tensor")), (r"down$", P("tensor"))]
    specs = [(rf"^blocks/{rule}", P(None, *spec)) for rule, spec in specs] + [(rf"^{rule}", s) for rule, s in specs]
    steps = [{name: batch[name] for name in ("x", "y")} for batch in rows()]
    mesh = jaxshard.make_mesh(tensor=2, devices=jax.devices()[:4])
    opt = jaxshard.hybrid(sgd(), mesh, specs=specs, zero=zero, min_shard_size=1)
    want = one_device(tensor_loss, sgd(), params, steps)
    for a, b in zip(sharded(tensor_loss, opt, params, steps, microbatches=microbatches), want, strict=True):
        assert_close(a, b, 1e-12)


# What other people's losses do.


def rows(count=2):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(24, 8)),
            "y": rng.normal(size=(24, 8)),
            "ids": rng.integers(0, 8, 24).astype(np.int32),
            "mask": rng.integers(0, 2, 24).astype(bool),
            "image": rng.normal(size=(24, 4, 4, 2)),
            "key": jax.random.split(jax.random.key(i), 24),
        }
        for i in range(count)
    ]


def weights():
    rng = np.random.default_rng(1)
    shapes = {"a": (8, 16), "b": (16, 8), "c": (8,), "layers": (3, 8, 8), "odd": (7, 3)}
    shapes |= {"kernel": (3, 3, 2, 8), "narrow": (3, 3, 4, 8), "experts": (4, 8, 8), "router": (8, 4)}
    return {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}


def base(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]


def fit(y, batch):
    return jnp.mean(jnp.square(y - batch["y"]))


def asked(p, x):
    return base(jaxshard.unshard(p), x)


def of_remat(policy=None, prevent_cse=True):
    def loss(p, batch):
        def layer(p, x):
            p = jaxshard.unshard(p)
            return checkpoint_name(jnp.tanh(x @ p["a"]), "h") @ p["b"] + p["c"]

        layer = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)
        return fit(layer(p, layer(p, batch["x"])), batch)

    return loss


def nested_jits_and_remats(p, batch):
    inner = jax.jit(jax.checkpoint(jax.jit(asked)))
    outer = jax.checkpoint(lambda p, x: inner(p, inner(p, x)))
    return fit(jax.jit(outer)(p, batch["x"]), batch)


def remat_of_integers_masks_and_keys(p, batch):
    @jax.checkpoint
    def layer(p, x, ids, mask, keys):
        h = jnp.where(mask[:, None], jnp.tanh(x @ jaxshard.unshard(p["a"])), 0.0)
        h = h * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (16,)))(keys)
        h = h + jax.nn.one_hot(ids, 16)
        return h @ jaxshard.unshard(p["b"]), (ids + 1) % 8, ~mask, keys, h

    y, ids, mask, keys, _ = layer(p, batch["x"], batch["ids"], batch["mask"], batch["key"])
    y, _, _, _, h = layer(p, y, ids, mask, keys)
    return fit(y, batch) + jnp.mean(jnp.square(h))


def remat_that_returns_what_it_counts(p, batch):
    @jax.checkpoint
    def layer(p, x):
        y = asked(p, x)
        return y, jnp.argmax(y, -1, keepdims=True), y > 0

    y, best, positive = layer(p, batch["x"])
    count = jax.checkpoint(lambda p, x: jnp.argmax(x @ jaxshard.unshard(p["a"]), -1))(p, batch["x"])
    return fit(y * positive + jnp.take_along_axis(y, best, -1) + count[:, None], batch)


def remat_of_what_stands_still(p, batch):
    """Neither the frozen parameter nor the rows have gradients."""
    y = jax.checkpoint(lambda w, x: jnp.tanh(x @ jaxshard.unshard(w)))(lax.stop_gradient(p["a"]), batch["x"])
    return fit(y @ p["b"], batch)


def remat_that_prints(p, batch):
    @jax.checkpoint
    def layer(p, x):
        y = asked(p, x)
        jax.debug.callback(lambda total: None, jnp.sum(y))
        return y

    return fit(layer(p, batch["x"]), batch)


def scan_of_mixed_carries(p, batch):
    def layer(carry, w):
        x, place, scale, flag = carry
        x = x + jnp.tanh(x @ jaxshard.unshard(w)) * (place + 1)
        return (x, place + 1, scale * 0.5, ~flag), place

    start = (batch["x"], 0, jnp.float32(1.0), False)
    (x, place, scale, flag), places = lax.scan(jax.checkpoint(layer), start, p["layers"])
    return fit(asked(p, x) * scale + place + flag + jnp.sum(places), batch)


def loops_and_branches(p, batch):
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], p["layers"])
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["layers"][i]), x)
    x = lax.cond(jnp.sum(p["c"]) > 0, lambda x: x @ p["a"], lambda x: jnp.tanh(x @ jaxshard.unshard(p["a"])), x)
    return fit(x @ jaxshard.unshard(p["b"]), batch)


def products_of_many_kinds(p, batch):
    x, w = batch["x"], jaxshard.unshard(p["layers"])
    both = jnp.square(w @ w).sum() + jnp.square(p["a"] @ p["a"].T).sum()
    y = jnp.einsum("bi,lij,ljk->bk", x, w, w) + jax.vmap(lambda row: jnp.tanh(row @ p["a"]))(x) @ p["b"]
    waves = (x @ p["a"]).astype(complex) * jnp.exp(0.3j) @ p["b"].astype(complex)
    counts = (x > 0).astype(np.int32) @ jnp.ones((8, 8), np.int32)
    still = lax.stop_gradient(x @ p["a"]) @ p["b"] + x @ lax.stop_gradient(p["a"]) @ lax.stop_gradient(p["b"])
    return fit(y + waves.real + waves.imag + counts + still + jnp.vdot(p["c"], p["c"]), batch) + 0.01 * both


def convolutions(p, batch):
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    @jax.checkpoint
    def layer(p, x):
        x = jnp.tanh(lax.conv_general_dilated(x, jaxshard.unshard(p["kernel"]), (1, 1), "SAME", **how))
        return lax.conv_general_dilated(x, p["narrow"], (1, 1), "SAME", feature_group_count=2, **how)

    x = lax.conv_transpose(layer(p, batch["image"]), p["kernel"], (2, 2), "SAME", transpose_kernel=True, **how)
    return jnp.mean(jnp.square(x))


@jax.custom_vjp
def third_party(x, w):
    return jnp.tanh(x @ w)


def _third_party_backward(saved, cotangent):
    x, w = saved
    inner = cotangent * (1 - third_party(x, w) ** 2)
    return inner @ w.T, x.T @ inner


third_party.defvjp(lambda x, w: (third_party(x, w), (x, w)), _third_party_backward)


@jax.custom_jvp
def by_tangents(x, w):
    return jnp.tanh(x @ w)


@by_tangents.defjvp
def _by_tangents(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return by_tangents(x, w), (1 - by_tangents(x, w) ** 2) * (dx @ w + x @ dw)


def rules_of_others(p, batch):
    layer = jax.checkpoint(lambda p, x: by_tangents(third_party(x, jaxshard.unshard(p["a"])), p["b"]))
    return fit(layer(p, layer(p, batch["x"])), batch)


def gradient_penalty(p, batch):
    layer = jax.checkpoint(asked)
    by_x = jax.grad(lambda x: jnp.sum(layer(p, x)))(batch["x"])
    along = jax.jvp(lambda x: base(p, x), (batch["x"],), (batch["y"],))[1]
    return fit(layer(p, batch["x"]), batch) + jnp.mean(by_x**2) + jnp.mean(along**2)


def picks(p, batch):
    """Targets of a classifier: in each way that JAX has, out of range, and in a dtype too narrow to count."""
    y, ids = jax.nn.log_softmax(base(p, batch["x"])), batch["ids"][:, None]
    wide = jax.nn.log_softmax(jnp.tile(y, (1, 40)) * jnp.cos(jnp.arange(320.0)))
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    return -sum(
        jnp.mean(x)
        for x in (
            jnp.take_along_axis(y, ids, -1),
            jnp.take_along_axis(y, ids - 8, -1) ** 2,
            jnp.take_along_axis(y, 2 * ids, -1, mode="fill", fill_value=0.0),
            jnp.take_along_axis(y, 2 * ids, -1, mode="clip"),
            jax.vmap(lambda row, i: row[i])(y, batch["ids"]) ** 3,
            y[jnp.arange(y.shape[0]), batch["ids"]],
            lax.gather(wide, ids.astype(np.uint8)[..., None], numbers, (1, 1), mode="fill"),
            p["c"][jnp.array([3])],
            lax.top_k(y, 2)[0],
        )
    )


def experts(p, batch):
    shares = jax.nn.softmax(batch["x"] @ p["router"])
    weight, which = lax.top_k(shares, 2)

    @jax.checkpoint
    def mixed(p, x, weight, which):
        sent = jax.nn.one_hot(which, 4) * weight[..., None]
        return jnp.einsum("td,edf,tke->tf", x, jaxshard.unshard(p["experts"]), sent)

    y = mixed(p, batch["x"], weight, which) + jnp.take_along_axis(shares, which[:, :1], -1)
    return fit(y + jnp.einsum("td,tdf->tf", batch["x"], p["experts"][which[:, 0]]), batch)


LOSSES = {
    "a remat": of_remat(),
    "a remat without its barriers": of_remat(prevent_cse=False),
    "a remat that keeps products": of_remat(jax.checkpoint_policies.dots_saveable),
    "a remat that keeps names": of_remat(jax.checkpoint_policies.save_only_these_names("h")),
} | {
    loss.__name__: loss
    for loss in (
        nested_jits_and_remats,
        remat_of_integers_masks_and_keys,
        remat_that_returns_what_it_counts,
        remat_of_what_stands_still,
        remat_that_prints,
        scan_of_mixed_carries,
        loops_and_branches,
        products_of_many_kinds,
        convolutions,
        rules_of_others,
        gradient_penalty,
        picks,
        experts,
    )
}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_strangers(loss, strategy):
    want = one_device(LOSSES[loss], sgd(), weights(), rows())
    got = sharded(LOSSES[loss], opt_of(strategy), weights(), rows())
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_strangers_by_the_rules_for_tpus(as_on, loss, strategy):
    as_on("tpu")
    want = one_device(LOSSES[loss], sgd(), weights(), rows())
    got = sharded(LOSSES[loss], opt_of(strategy), weights(), rows())
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


def test_a_parameter_that_is_cast_later_keeps_its_bits():
    values = np.array([[1.5, -0.0, 0.0], [np.inf, -np.inf, np.nan]], np.float32)
    later = jax.jit(lambda x: Sharded(x, None, (), ()).cast_later().whole())(values)
    np.testing.assert_array_equal(np.asarray(later).view(np.uint32), values.view(np.uint32))


def test_narrow_shards_are_scattered_transposed_on_tpu(as_on):
    as_on("tpu")
    mesh, rng = jaxshard.make_mesh(), np.random.default_rng(1)
    x = rng.integers(-4, 5, (8, 3, 8 * 128)).astype(jnp.bfloat16)
    scatter = jax.shard_map(
        lambda x: collectives.scatter_sum(x[0], ((-1, ("data",)),)),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(None, "data"),
    )
    text = jax.jit(scatter).lower(x).as_text()
    assert "scatter_dimension = 0" in text
    np.testing.assert_array_equal(np.asarray(scatter(x), np.float32), x.astype(np.float32).sum(0))


def halved(x):
    """A loop that JAX cannot differentiate."""
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1, lambda x: x / 2, x)


def unrolled(p, batch):
    """Between the first uses of parameters it computes what has no gradient."""
    x, still = batch["x"], batch["x"]
    for name in ("a", "b"):
        x, still = jnp.tanh(x @ p[name]), halved(still + 1)
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ jaxshard.unshard(w)), None), x, p["layers"])
    return jnp.mean(jnp.square(jax.checkpoint(asked)(p, x) @ p["router"])) + 0 * jnp.mean(still)


@pytest.mark.parametrize("loss", [unrolled, nested_jits_and_remats, experts, remat_of_integers_masks_and_keys])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_losses_whose_gradients_are_reduced_bucket_by_bucket(monkeypatch, loss, strategy):
    """Each parameter in a bucket of its own."""
    monkeypatch.setattr(ordered, "BUCKET_BYTES", 1)
    want = one_device(loss, sgd(), weights(), rows())
    got = sharded(loss, opt_of(strategy), weights(), rows(), loss_view="local")
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


# Callers that differentiate.


def of_all_kinds(p, batch):
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ jaxshard.unshard(w)), None)), batch["x"], p["layers"])
    y = jax.nn.log_softmax(jax.checkpoint(asked)(p, x))
    return jnp.mean(jnp.square(y)) - jnp.mean(jnp.take_along_axis(y, batch["ids"][:, None], -1))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_evaluate_and_gradients_can_be_differentiated(strategy):
    """Once the program of the loss is gone, too: a rematerialized part must not be lost with it."""
    opt, (batch,) = opt_of(strategy), rows(1)
    params, plain = opt.place(weights()), jax.tree.map(jnp.asarray, weights())
    gradient = jax.grad(of_all_kinds)

    def projected(fn):
        return lambda p: sum(jnp.sum(jnp.cos(jnp.arange(x.size)) * x.ravel()) for x in jax.tree.leaves(fn(p)))

    evaluate, ours = jaxshard.evaluate(of_all_kinds, opt), jaxshard.value_and_grad(of_all_kinds, opt)

    def late(p):
        _, pullback = jax.vjp(lambda p: evaluate(p, batch), p)
        gc.collect()
        return pullback(jnp.ones(()))[0]

    assert_close(jax.jit(late)(params), gradient(plain, batch), 1e-12)
    tangent = jax.jit(lambda p: jax.jvp(lambda p: evaluate(p, batch), (p,), (p,))[1])(params)
    assert_close(tangent, jax.jvp(lambda p: of_all_kinds(p, batch), (plain,), (plain,))[1], 1e-12)
    second = jax.jit(jax.grad(projected(lambda p: ours(p, batch)[1])))(params)
    assert_close(second, jax.grad(projected(lambda p: gradient(p, batch)))(plain), 1e-12)


def test_what_xla_fuses_is_not_held_back():
    """A product with one row or column is a multiplication and a sum: a barrier would write its gradients out."""
    states = jax.ShapeDtypeStruct((4, 3, 6, 8), jnp.float64)
    opt = opt_of("ddp")

    def num_barriers(of_each, of_all):
        def loss(p, batch):
            found = jnp.einsum(of_each, jnp.tanh(batch * p["w"]), jnp.sin(batch * p["v"])[of_all])
            return jnp.mean(found**2)

        params = {name: jax.ShapeDtypeStruct((6, 8), jnp.float64) for name in ("w", "v")}
        return jax.jit(jaxshard.value_and_grad(loss, opt)).lower(params, states).as_text().count("optimization_barrier")

    by_column = num_barriers("bldn,bln->bld", np.s_[:, :, 0])
    assert num_barriers("bldn,blen->blde", np.s_[:, :, :3]) > by_column


# Rematerialization.


def flat(x, w, ids):
    return [jnp.tanh(x @ w), jnp.argmax(x @ w, -1) + ids, jnp.sin(x) @ w, jnp.sign(x @ w)]


RECOMPUTED = backward.Recomputed(flat, (True, False, True, False))


def arguments():
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray(rng.normal(size=(4, 5))), jnp.arange(6)


def test_recomputed_keeps_its_arguments_and_nothing_else():
    _, pullback = jax.vjp(lambda x, w: RECOMPUTED(x, w, jnp.arange(6))[0], *arguments()[:2])
    kept = sorted(x.shape for x in jax.tree.leaves(pullback) if x.size > 1)
    assert kept == [(4, 5), (6,), (6, 4)]


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize("wrt", [(0,), (1,), (0, 1)])
def test_recomputed_has_the_gradients_of_its_function(used, wrt):
    def total(fn):
        return lambda *args: sum(jnp.sum(jnp.square(fn(*args)[i])) for i in used)

    got = jax.grad(total(RECOMPUTED), wrt)(*arguments())
    assert_close(got, jax.grad(total(flat), wrt)(*arguments()), 1e-14)


def test_what_recomputed_returns_without_a_gradient_stays_without():
    """JAX would differentiate a loop over it, too."""
    gradient = jax.grad(lambda x, w: jnp.sum(halved(2 * RECOMPUTED(x, w, jnp.arange(6))[3])))(*arguments()[:2])
    assert not np.any(gradient)


def test_remats_that_keep_products_do_not_compute_them_again():
    """The rules of products must not hide them from a policy."""

    opt, (batch,) = opt_of("zero3"), rows(1)

    def num_products(fn):
        lowered = jax.jit(fn).lower(opt.place(weights()), batch)
        return lowered.compile().as_text().count(" dot(")

    for name in ("a remat that keeps products", "a remat"):
        loss = LOSSES[name]
        assert num_products(jaxshard.value_and_grad(loss, opt)) == num_products(jax.value_and_grad(loss)), name


# The gather over old params.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gather_over_old_arrays(kind):
    """Each stack is whole, and nothing of the old arrays, which are NaN here, is left."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    cuts = [
        ((5, 8, 6), {1: ("a", "b")}),
        ((5, 4, 8), {1: ("a",), 2: ("b",)}),
        ((3, 4, 4), {2: ("b", "a")}),
        ((8, 4, 4), {0: ("a", "b")}),
        ((8, 4), {0: ("a", "b")}),
        ((2, 3, 2, 4), {3: ("a",)}),
        ((3, 4, 4), {}),
    ]
    arrays = [jnp.cos(jnp.arange(np.prod(shape), dtype=float)).reshape(shape) for shape, _ in cuts]
    froms = [P(*(dims.get(i) for i in range(len(shape)))) for shape, dims in cuts]
    dims = [tuple((dim - len(shape), axes) for dim, axes in dims.items()) for shape, dims in cuts]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, froms, strict=True)]
    old = [jax.device_put(jnp.full_like(x, jnp.nan), NamedSharding(mesh, P())) for x in arrays]

    @jax.jit
    def gathered(placed, old):
        return global_view.gather_all(placed, mesh, froms, [P()] * len(cuts), dims, over=old)

    for got, want in zip(gathered(placed, old), arrays, strict=True):
        assert got.is_fully_replicated
        np.testing.assert_array_equal(got, want)


def test_an_update_by_itself_leaves_its_params():
    """Only a step writes over its params; an update computes its result from the old ones, too."""
    params = {"a": jnp.ones((8, 16), jnp.bfloat16), "layers": jnp.ones((3, 8, 8), jnp.bfloat16)}
    opt = opt_of("zero2", master_dtype=jnp.float32)
    setup, state = setup_of(opt, "test"), opt.init(params)

    def writes(want):
        advance = functools.partial(update.advance, setup, extra={}, want=want)
        return "dynamic_update_slice" in str(jax.make_jaxpr(advance)(params, state, params))

    assert writes("params")
    assert not writes("updates")


# Planted bugs.


def far(loss, strategy="zero3"):
    want = one_device(loss, sgd(), weights(), rows())
    return max(distances(sharded(loss, opt_of(strategy), weights(), rows())[0], want[0]).values())


def test_planted_a_gradient_lost_on_the_way(monkeypatch):
    real = lax.optimization_barrier

    def lossy(x):
        leaves, treedef = jax.tree.flatten(x)
        return real(jax.tree.unflatten(treedef, [*leaves[:-1], jnp.zeros_like(leaves[-1])]))

    monkeypatch.setattr(backward.lax, "optimization_barrier", lossy)
    for loss in ("products_of_many_kinds", "a remat", "nested_jits_and_remats"):
        assert far(LOSSES[loss]) > 1e-3


def test_planted_a_pick_off_by_one(monkeypatch):
    real = lax.broadcasted_iota
    monkeypatch.setattr(backward.lax, "broadcasted_iota", lambda *args: real(*args) + 1)
    assert far(picks) > 1e-3


def test_planted_a_layer_gathered_into_the_next(monkeypatch):
    real = lax.dynamic_update_index_in_dim
    wrong = lambda x, part, i, axis: real(x, part, (i + 1) % x.shape[axis], axis)  # noqa: E731
    monkeypatch.setattr(collectives.lax, "dynamic_update_index_in_dim", wrong)
    assert far(LOSSES["scan_of_mixed_carries"], "zero2") > 1e-3
