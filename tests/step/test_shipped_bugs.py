"""The bugs that sharded optimizers have shipped, each with a test of its name.

One setting has all hazards at once: a global-norm clip that bites in every step, a leaf that no device count divides
(kept whole), leaves replicated over a tensor axis, tied weights, a masked decay and four microbatches, with momentum,
which unlike Adam does not forget the gradient's scale. In double precision it must equal one device; then each bug is
planted, and the same comparison must see it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import assert_close, distance, one_device, sharded

import jaxshard

pytestmark = [pytest.mark.filterwarnings("ignore:.*cannot be sharded:UserWarning"), pytest.mark.usefixtures("x64")]

EXACT, SEEN = 1e-12, 1e-4
MICROBATCHES, LIMIT, DECAY = 4, 0.05, 0.5
SPECS = [("^up$", P(None, "tensor")), ("^down$", P("tensor", None)), (".*", P())]
where = pytest.mark.parametrize(("strategy", "tensor"), [("zero1", 1), ("zero2", 2), ("zero3", 1), ("zero3", 2)])
mixed = pytest.mark.parametrize(("strategy", "tensor"), [("zero1", 1), ("zero2", 2), ("zero3", 2)])


def weights():
    rng = np.random.default_rng(3)
    shapes = {"table": (8, 16), "up": (16, 32), "down": (32, 16), "bias": (8,), "odd": (7,)}
    return {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}


def steps(count=4):
    """Different rows everywhere, of very different weight; "microbatch_N" says which one a row is in, on N shards."""
    rng, found = np.random.default_rng(4), []
    for _ in range(count):
        batch = {"x": rng.normal(size=(64, 8)), "y": rng.normal(size=(64, 8)), "weight": rng.exponential(size=64) ** 2}
        by_shards = {f"microbatch_{n}": np.arange(64) // (64 // n // MICROBATCHES) % MICROBATCHES for n in (4, 8)}
        found.append(batch | by_shards)
    return found


def errors_of_rows(params, batch, total):
    """The squared error of each row; `total` sums over what cuts the hidden features."""
    p = jaxshard.unshard({name: params[name] for name in ("up", "down")})
    hidden = jnp.tanh(batch["x"] @ params["table"])
    hidden = hidden + total(jnp.tanh(hidden @ p["up"]) @ p["down"])
    out = hidden @ params.get("head", params["table"]).T + params["bias"]
    return jnp.mean(jnp.square(out - batch["y"]), -1) + (1 + batch["x"][:, 0]) * jnp.sum(params["odd"] ** 3)


def over_tensor(x):
    """Megatron's sum: nothing to do on one device."""
    return lax.psum(x, "tensor")


def loss(params, batch, total=over_tensor):
    return jnp.mean(errors_of_rows(params, batch, total))


def weighted(params, batch, total=over_tensor):
    return jnp.sum(errors_of_rows(params, batch, total) * batch["weight"]), jnp.sum(batch["weight"])


def weighted_mean(params, batch, total=over_tensor):
    summed, weight = weighted(params, batch, total)
    return summed / weight


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def optimizer(clip=None, mask=matrices):
    clip = optax.clip_by_global_norm(LIMIT) if clip is None else clip
    return optax.chain(clip, optax.add_decayed_weights(DECAY, mask), optax.sgd(0.3, momentum=0.9))


def opt_of(strategy, tensor, tx=None, devices=8):
    mesh = jaxshard.make_mesh(tensor=tensor, devices=jax.devices()[:devices])
    return getattr(jaxshard, strategy)(optimizer() if tx is None else tx, mesh, specs=SPECS, min_shard_size=1)


@functools.cache
def expected(loss_fn=loss):
    """One device, plain optax, jitted, the whole batch at once."""
    return one_device(functools.partial(loss_fn, total=lambda x: x), optimizer(), weights(), steps())


def trained(strategy, tensor, tx=None, loss_fn=loss, params=None, **options):
    opt = opt_of(strategy, tensor, tx)
    return sharded(loss_fn, opt, params or weights(), steps(), microbatches=MICROBATCHES, **options)


def error(result, want=None):
    """The largest distance of any leaf of the params from one device's."""
    want = expected() if want is None else want
    return max(distance(result[0][name], want[0][name]) for name in want[0])


@functools.cache
def right(strategy, tensor):
    """How far the library itself is away: params, state and losses."""
    result = trained(strategy, tensor)
    assert_close(result, expected(), EXACT)
    return error(result)


# Norms.


def clip_on_shards(strategy, tensor, axes_summed):
    """Clipping written as most libraries do: on the parts that a device holds, with sums over `axes_summed(spec)`."""
    opt = opt_of(strategy, tensor)
    specs = opt.shardings(weights()).specs.grads

    def clip(grads):
        squares = [
            lax.psum(jnp.sum(g**2), axes) if (axes := axes_summed(spec)) else jnp.sum(g**2)
            for g, spec in zip(jax.tree.leaves(grads), jax.tree.leaves(specs), strict=True)
        ]
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, LIMIT / jnp.sqrt(sum(squares))), grads)

    run = jax.shard_map(clip, mesh=opt.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return optax.stateless(lambda grads, _: run(grads))


def own_axes(spec):
    return tuple(axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))


@where
def test_a_leaf_kept_whole_beside_cut_ones_in_one_norm(strategy, tensor):
    """One norm over a tree of cut leaves and of leaves that no device count divides, taken on what a device holds.

    Mechanism: the device adds the squares of 1/N of the cut leaves and of all of the whole one. Symptom: the norm is
    too small and another one on each device, so each clips by its own factor, and copies of whole leaves drift apart.
    """
    assert right(strategy, tensor) <= EXACT
    clip = clip_on_shards(strategy, tensor, lambda spec: ())
    result = trained(strategy, tensor, optimizer(clip))
    assert error(result) > SEEN
    copies = [shard.data for shard in result[0]["odd"].addressable_shards]
    assert max(distance(copy, copies[0]) for copy in copies) > SEEN


@where
def test_a_replicated_leaf_counted_n_times_in_the_global_norm(strategy, tensor):
    """Squares summed over the whole mesh, whether a leaf is cut there or not.

    Mechanism: each device adds its copy of a whole leaf, or of one replicated over the tensor axis alone. Symptom: the
    norm is too large, grows with the device count, and clipping becomes stronger on more devices.
    """
    assert right(strategy, tensor) <= EXACT
    clip = clip_on_shards(strategy, tensor, lambda spec: ("data", "tensor"))
    assert error(trained(strategy, tensor, optimizer(clip))) > SEEN


@pytest.mark.parametrize(("strategy", "tensor"), [("zero2", 2)])
def test_a_clip_on_shards_that_sums_over_what_cuts_each_leaf_is_exact(strategy, tensor):
    """The control of the two above: of the hand-written clip, nothing but the sums was wrong."""
    assert error(trained(strategy, tensor, optimizer(clip_on_shards(strategy, tensor, own_axes)))) <= EXACT


# Gradients.


@jax.custom_vjp
def clipped_in_backward(params):
    return params


def _clip_own(_, grads):
    def square(g):
        cut = "tensor" in jax.typeof(g).manual_axis_type.varying
        return lax.psum(jnp.sum(g**2), "tensor") if cut else jnp.sum(g**2)

    norm = jnp.sqrt(sum(square(g) for g in jax.tree.leaves(grads)))
    return (jax.tree.map(lambda g: g * jnp.minimum(1.0, LIMIT / norm), grads),)


clipped_in_backward.defvjp(lambda params: (params, None), _clip_own)


@where
def test_clip_before_reduce(strategy, tensor):
    """Each device clips the gradient of its own rows, and the average is taken of what is left.

    Mechanism: the clip sits in the local step, before the sum over the data axis. Symptom: rows with large gradients
    weigh less, the average is shorter than the limit, and the result depends on how rows are dealt to devices.
    """
    assert right(strategy, tensor) <= EXACT
    early = trained(strategy, tensor, loss_fn=lambda params, batch: loss(clipped_in_backward(params), batch))
    assert error(early) > SEEN


@where
def test_last_microbatch_lost(strategy, tensor):
    """The gradient of the last microbatch is computed, and never added.

    Mechanism: the sum is scattered (or applied) one iteration early, or the last one's accumulation is not awaited.
    Symptom: the loss looks right, one row in m teaches nothing, and gradients are too small by (m - 1)/m.
    """

    def lossy(params, batch):
        last = batch[f"microbatch_{8 // tensor}"][0] == MICROBATCHES - 1
        value = loss(params, batch)
        return jnp.where(last, lax.stop_gradient(value), value)

    assert right(strategy, tensor) <= EXACT
    with pytest.warns(jaxshard.RowsWarning, match="positions in the batch"):
        params, state, losses = trained(strategy, tensor, loss_fn=lossy)
    assert losses[0] == pytest.approx(expected()[2][0], rel=EXACT)  # which is why nobody noticed
    assert error((params, state, losses)) > SEEN


@mixed
def test_mean_of_means(strategy, tensor):
    """The mean over devices and microbatches of weighted means, as if all weighed the same.

    Mechanism: each divides by the weight (the number of tokens that are no padding) of its own rows. Symptom: rows in
    light parts of the batch count for more, and the loss depends on how rows are dealt.
    """
    got, want = trained(strategy, tensor, loss_fn=weighted, weighted=True), expected(weighted_mean)
    assert_close(got, want, EXACT)
    with pytest.warns(jaxshard.RowsWarning, match="weighted=True"):
        assert error(trained(strategy, tensor, loss_fn=weighted_mean), want) > SEEN


# The optimizer.


@mixed
@pytest.mark.parametrize("how", ["twice", "apart"])
def test_tied_weights_updated_once_per_copy(strategy, tensor, how):
    """A table that is the embedding and the output layer, listed under both names.

    Mechanism: the optimizer visits it once per name ("twice"), or each name is a copy with a gradient of its own, which
    nothing adds up ("apart"). Symptom: it moves twice as far; or the copies drift apart and are tied in name only.
    """
    assert right(strategy, tensor) <= EXACT
    if how == "twice":
        again = optax.masked(optax.scale(2.0), lambda params: {name: name == "table" for name in params})
        assert error(trained(strategy, tensor, optax.chain(optimizer(), again))) > SEEN
    else:
        params = trained(strategy, tensor, params=weights() | {"head": weights()["table"]})[0]
        assert error((params,)) > SEEN
        assert distance(params["head"], params["table"]) > SEEN


@mixed
@pytest.mark.parametrize("mask", [None, "of flat buffers"])
def test_weight_decay_mask_lost(strategy, tensor, mask):
    """A mask that is a function of the params, and decides by their dims.

    Mechanism: it is dropped on the way to the sharded optimizer (None), or asked about flat shards, on which every leaf
    has one dim. Symptom: biases and norms decay, or nothing does; the loss curve hardly tells.
    """
    assert right(strategy, tensor) <= EXACT
    lost = mask and (lambda params: matrices(jax.tree.map(jnp.ravel, params)))
    assert error(trained(strategy, tensor, optimizer(mask=lost))) > SEEN


# Resuming.

ADAM = optax.chain(
    optax.clip_by_global_norm(LIMIT),
    optax.adamw(optax.linear_schedule(0.1, 0.01, 4), weight_decay=DECAY, mask=matrices),
)


def moments(state, keep):
    """The state with what `keep(leaf)` does not keep set back to its start."""
    return jax.tree.map(lambda x: x if keep(x) else np.zeros_like(x), state)


@functools.cache
def halves(strategy, tensor, devices):
    """`go(params, state, steps) -> (params, state)` under one strategy and mesh, and its optimizer."""
    opt = opt_of(strategy, tensor, ADAM, devices)
    step = jaxshard.train_step(loss, opt)

    def go(params, state, batches):
        for batch in batches:
            params, state, _ = step(params, state, batch)
        return jax.device_get((params, state))

    return go, opt


@functools.cache
def uninterrupted():
    return one_device(functools.partial(loss, total=lambda x: x), ADAM, weights(), steps())[:2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero1", 1, 8), ("zero3", 2, 4)),
        (("zero3", 2, 4), ("zero2", 2, 8)),
        (("zero3", 1, 8), ("ddp", 1, 1)),
    ],
)
def test_moments_reset_on_resume(before, after):
    """Saved as NumPy arrays half way, and resumed under another strategy on another number of devices.

    Mechanism: the state is keyed by rank or by shard and does not fit the new layout, so it is made afresh, in part or
    whole. Symptom: the loss jumps after each resume and recovers; the step count, and so bias correction and the
    learning rate, start over.
    """
    (first, opt), (second, other) = halves(*before), halves(*after)
    params, state = first(opt.place(weights()), opt.init(weights()), steps()[:2])
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves((params, state)))
    want = uninterrupted()
    assert_close(second(params, state, steps()[2:]), want, EXACT)
    fresh = jax.device_get(other.init(params))
    for lost in (fresh, moments(state, lambda x: x.ndim == 0), moments(state, lambda x: x.ndim > 0)):
        assert error(second(params, lost, steps()[2:]), want) > SEEN
