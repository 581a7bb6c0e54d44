"""Losses of two kinds: means over independent rows, and others. `right` tells which; the tests also measure it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

LENGTH, WIDTH, CLASSES, HEADS = 6, 8, 7, 2
labels_of = optax.softmax_cross_entropy_with_integer_labels


def weights():
    rng = np.random.default_rng(0)
    shapes = {"w": (WIDTH, CLASSES), "table": (CLASSES, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH)}
    shapes |= {"place": (LENGTH, WIDTH), "route": (WIDTH, 4), "kernel": (3, 3, 3, 4), "scalar": ()}
    return {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}


def batch_of(rows, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, WIDTH)),
        "y": rng.integers(0, CLASSES, rows),
        "mask": rng.integers(0, 2, (rows, CLASSES)).astype(float),
        "tokens": rng.integers(0, CLASSES, (rows, LENGTH + 1)),
        "h": rng.normal(size=(rows, LENGTH, WIDTH)),
        "image": rng.normal(size=(rows, 6, 6, 3)),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """`says`: a word of the warning; `proved`: the trace shows that it is right; `rows`: the fewest rows on a device;
    `own`: the loss has collectives; `nan`: measure it with a NaN in one row."""

    loss: Callable[..., Any]
    right: bool
    says: str = ""
    weighted: bool = False
    rows: int = 1
    own: bool = False
    nan: bool = False
    proved: bool = True


CASES: dict[str, Case] = {}


def case(right, says="", **options):
    def add(loss):
        CASES[loss.__name__] = Case(loss, right, says, **options)
        return loss

    return add


# Means over rows.


@case(True)
def squares(p, b):
    return jnp.mean((b["x"] @ p["w"]) ** 2)


@case(True)
def cross_entropy(p, b):
    return labels_of(b["x"] @ p["w"], b["y"]).mean()


@case(True)
def cross_entropy_by_index(p, b):
    logs = jax.nn.log_softmax(b["x"] @ p["w"])
    return -logs[jnp.arange(logs.shape[0]), b["y"]].mean()


@case(True)
def one_hot(p, b):
    return -jnp.mean(jnp.sum(jax.nn.one_hot(b["y"], CLASSES) * jax.nn.log_softmax(b["x"] @ p["w"]), -1))


@case(True)
def with_l2(p, b):
    return squares(p, b) + 0.1 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


@case(True)
def sum_over_number_of_rows(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2) / b["x"].shape[0]


@case(True)
def an_eighth_of_a_mean(p, b):
    return jnp.mean((b["x"] @ p["w"]) ** 2) / 8


@case(True)
def mean_within_each_row(p, b):
    each = jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"], -1) / jnp.maximum(b["mask"].sum(-1), 1)
    return each.mean()


@case(True)
def layer_norm(p, b):
    h = b["x"] @ p["w"]
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return jnp.mean(jnp.tanh(h) ** 2)


@case(True)
def attention(p, b):
    h = p["table"][b["tokens"][:, :-1]]
    heads = (*h.shape[:2], HEADS, WIDTH // HEADS)
    q, k = ((h @ p[name]).reshape(heads) for name in ("q", "k"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), k).reshape(h.shape) + p["place"]
    logits = h @ p["table"].T
    return labels_of(logits.reshape(-1, CLASSES), b["tokens"][:, 1:].reshape(-1)).mean()


@case(True)
def attention_of_jax(p, b):
    h = (b["h"] @ p["q"]).reshape(*b["h"].shape[:2], HEADS, WIDTH // HEADS)
    return jnp.mean(jax.nn.dot_product_attention(h, h, h, is_causal=True) ** 2)


@case(True)
def by_vmap(p, b):
    return jnp.mean(jax.vmap(lambda x, y: labels_of(x @ p["w"], y))(b["x"], b["y"]))


@case(True)
def by_map(p, b):
    return jnp.mean(lax.map(lambda x: jnp.sum((x @ p["w"]) ** 2), b["x"]))


@case(True)
def by_scan_over_rows(p, b):
    def body(total, x):
        return total + jnp.sum((x @ p["w"]) ** 2), None

    return lax.scan(body, jnp.zeros((), b["x"].dtype), b["x"])[0] / b["x"].shape[0]


@case(True)
def recurrent(p, b):
    def body(h, token):
        h = jnp.tanh(h @ p["q"] + p["table"][token])
        return h, h

    _, hidden = lax.scan(body, jnp.zeros((b["tokens"].shape[0], WIDTH)), b["tokens"].T)
    return jnp.mean(hidden**2)


@case(True, proved=False)
def in_four_chunks(p, b):
    h = b["h"].reshape(-1, WIDTH)

    def body(total, chunk):
        return total + jnp.sum((chunk @ p["w"]) ** 2), None

    chunks = h.reshape(2, -1, WIDTH)
    return lax.scan(jax.checkpoint(body), jnp.zeros((), h.dtype), chunks)[0] / h.shape[0]


@case(True)
def routing_within_rows(p, b):
    chosen = jax.nn.softmax(b["h"] @ p["route"])
    values, experts = lax.top_k(chosen, 2)
    hot = jax.nn.one_hot(experts, 4)
    kept = hot * (jnp.cumsum(hot.sum(2), 1) < 4)[:, :, None]
    inside = jnp.einsum("btke,btd->bed", kept, b["h"])
    return jnp.mean(jnp.einsum("bed,btke->btd", inside, kept * values[..., None]) ** 2)


@case(True, own=True)
def dropout(p, b):
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index("data"))
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, b["x"].shape), b["x"] @ p["q"], 0) ** 2)


@case(True)
def dropout_with_a_key_for_each_row(p, b):
    def of_one(i, x):
        return jnp.where(jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), i), 0.5, x.shape), x, 0)

    return jnp.mean(jax.vmap(of_one)(b["y"], b["x"] @ p["q"]) ** 2)


@case(True)
def random_features(p, b):
    return jnp.mean((b["x"] @ jax.random.normal(jax.random.key(3), (WIDTH, 5)) * p["scalar"]) ** 2)


@case(False, "further argument")
def dropout_with_a_constant_key(p, b):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, b["x"].shape)
    return jnp.mean((jnp.where(kept, b["x"], 0) @ p["w"]) ** 2)


@case(True)
def convolution(p, b):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(b["image"], p["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(h.reshape(h.shape[0], -1) ** 2)


@case(True)
def group_norm(p, b):
    h = b["image"].reshape(b["image"].shape[0], 36, 3)
    h = (h - h.mean((1, 2), keepdims=True)) / (h.std((1, 2), keepdims=True) + 1e-3)
    return jnp.mean((h.reshape(h.shape[0], -1)[:, :WIDTH] @ p["w"]) ** 2)


@case(True, rows=2)
def advantages_within_pairs(p, b):
    """As in GRPO: neighbouring rows belong to one prompt."""
    reward = jnp.sum(b["x"] @ p["w"], -1).reshape(-1, 2)
    return jnp.mean((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1) * reward)


@case(True, rows=2)
def neighbours(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean((h[::2] - h[1::2]) ** 2)


@case(True)
def bucket_sums(p, b):
    each = jnp.sum(b["x"] @ p["w"], -1)
    return jnp.sum(jax.ops.segment_sum(each, b["y"], CLASSES)) / b["x"].shape[0]


@case(True)
def chosen_by_a_parameter(p, b):
    return lax.cond(p["scalar"] > 0, lambda x: jnp.mean(x @ p["w"]), lambda x: jnp.mean(2 * x @ p["w"]), b["x"])


@case(False, nan=True)
def guarded_against_nan(p, b):
    mean = jnp.mean(b["x"] @ p["w"])
    return jnp.where(jnp.isfinite(mean), mean, 0.0)


@case(False, nan=True)
def thrown_away_for_a_bad_label(p, b):
    loss = jnp.mean(b["x"] @ p["w"])
    return jnp.where(jnp.all(jnp.isfinite(b["x"])), loss, 0.0)


@case(False, "reduce_sum")
def a_sum_through_a_mutable_array(p, b):
    total = jax.new_ref(jnp.zeros(()))
    total[...] = jnp.mean(b["x"] @ p["w"])
    total[...] = 3 * total[...]
    return total[...] ** 2


@case(True)
def rows_through_a_mutable_array(p, b):
    each = jax.new_ref(jnp.zeros(b["x"].shape[0]))
    each[...] = jnp.sum((b["x"] @ p["w"]) ** 2, -1)
    return jnp.mean(jax.freeze(each))


@case(True)
def rows_guarded_against_nan(p, b):
    each = jnp.sum(b["x"] @ p["w"], -1)
    return jnp.mean(jnp.where(jnp.isfinite(each), each, 0.0))


@case(True)
def variational(p, b):
    z = b["x"] @ p["w"]
    return jnp.mean(jnp.sum(z**2, -1)) - 0.5 * jnp.sum(1 + z - jnp.exp(z)) / z.shape[0]


@case(True)
def loops_of_different_lengths(p, b):
    def halve(x):
        return lax.while_loop(lambda c: c[0] < 3 * jnp.abs(x.sum()), lambda c: (c[0] + 1.0, 0.5 * c[1]), (0.0, x))[1]

    return jnp.mean(jax.vmap(halve)(b["x"]) @ p["w"])


@case(True)
def focal(p, b):
    return optax.sigmoid_focal_loss(b["x"] @ p["w"], b["mask"]).mean()


@case(True)
def aligned_by_ctc(p, b):
    pads = jnp.zeros(b["tokens"].shape)
    logits = jnp.repeat(b["h"] @ p["w"], 2, axis=1)
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), 1 + b["tokens"][:, :4] % 6, pads[:, :4]).mean()


@case(True)
def spectrum_of_each_row(p, b):
    return jnp.mean(jnp.abs(jnp.fft.rfft(b["h"] @ p["w"], axis=1)) ** 2)


@case(True)
def gradient_penalty(p, b):
    return jnp.mean(jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"])))(b["x"]) ** 2, -1))


@case(True)
def sorted_within_rows(p, b):
    return jnp.mean(jnp.sort(b["x"] @ p["w"], -1)[:, ::-1].cumsum(-1) ** 2)


@case(True)
def two_views_of_each_row(p, b):
    both = jnp.concatenate([b["x"], jnp.cos(b["x"])]) @ p["w"]
    one, two = jnp.split(both, 2)
    return jnp.mean((one - two) ** 2)


@case(True, weighted=True)
def sum_and_count(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2), jnp.asarray(b["x"].shape[0], float)


@case(True, weighted=True)
def sum_and_weights(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"]), b["mask"].sum()


@case(True, weighted=True)
def sum_and_weights_and_l2(p, b):
    weight = b["mask"].sum()
    return jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"]) + 0.1 * jnp.sum(p["w"] ** 2) * weight, weight


@case(True, weighted=True)
def mean_and_one(p, b):
    return squares(p, b), 1.0


@case(True, own=True)
def batch_norm_over_devices(p, b):
    h = b["x"] @ p["w"]
    mean, square = (lax.pmean(x.mean(0), "data") for x in (h, h**2))
    return jnp.mean(jnp.tanh((h - mean) * lax.rsqrt(square - mean**2 + 1e-5)) ** 2)


@case(True, own=True)
def batch_norm_within_a_vmap(p, b):
    """Like equinox's BatchNorm, over the rows of this device and over the devices."""

    def of_one(x):
        mean = jax.lax.pmean(x, ("rows", "data"))
        return (x - mean) / jnp.sqrt(jax.lax.pmean((x - mean) ** 2, ("rows", "data")) + 1e-5)

    h = b["x"] @ p["w"]
    return jnp.mean(jax.vmap(of_one, axis_name="rows")(h) ** 3)


def _squares(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


@case(True)
def disturbed_by_the_sign_of_a_gradient(p, b):
    return _squares(p, b["x"] + 0.1 * jnp.sign(jax.grad(_squares, argnums=1)(p, b["x"])))


@case(True)
def penalty_of_the_gradients_of_a_sum(p, b):
    slopes = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2))(b["x"])
    return _squares(p, b["x"]) + jnp.mean(jnp.sum(slopes**2, -1))


@case(True, weighted=True, proved=False)
def sum_and_count_guarded_against_0(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"]), jnp.sum(b["mask"]) + 1e-20


@case(True, own=True)
def mean_over_devices(p, b):
    return lax.psum(_squares(p, b["x"]), "data") / lax.psum(1, "data")


@case(True, own=True)
def logsumexp_over_all_rows(p, b):
    z = jnp.sum(b["x"] @ p["w"], -1)
    most = lax.pmax(jnp.max(lax.stop_gradient(z)), "data")
    return most + jnp.log(lax.psum(jnp.sum(jnp.exp(z - most)), "data"))


@case(False, "all_gather", own=True)
def least_of_the_devices_maxima(p, b):
    return _squares(p, b["x"]) + lax.pmin(jnp.max(lax.stop_gradient(b["x"] @ p["w"])), "data")


@case(False, "all_gather", own=True)
def a_product_of_maxima_over_devices(p, b):
    largest = lax.stop_gradient(jnp.sin(b["x"]).max(0) @ p["w"])
    return lax.pmax(largest, "data").sum() + jnp.sum(p["q"] ** 2)


@case(True, own=True)
def hardest_row_of_all(p, b):
    return jnp.max(lax.all_gather(jnp.sum((b["x"] @ p["w"]) ** 2, -1), "data", tiled=True))


@case(True, own=True)
def contrastive_with_all_negatives(p, b):
    one, two = b["x"] @ p["w"], lax.all_gather(jnp.cos(b["x"]) @ p["w"], "data", tiled=True)
    mine = jnp.arange(one.shape[0]) + lax.axis_index("data") * one.shape[0]
    return labels_of(one @ two.T, mine).mean()


@case(True, own=True)
def sums_of_its_own(p, b):
    return lax.psum(jnp.sum((b["x"] @ p["w"]) ** 2), "data") / lax.psum(b["x"].shape[0], "data")


# Others.


@case(False, "sum over rows")
def a_sum(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2)


@case(False, "sum over rows")
def sum_over_a_fixed_number(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2) / 32


@case(False, "sum over rows")
def sum_over_a_fixed_number_of_elements(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2) / (32 * CLASSES)


@case(False, "sum over rows", own=True)
def sum_over_the_rows_of_all_devices(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2) / lax.psum(b["x"].shape[0], "data")


@case(False, "sum over rows")
def mean_times_number_of_rows(p, b):
    return squares(p, b) * b["x"].shape[0]


@case(False, "weighted=True")
def masked_mean(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"]) / b["mask"].sum()


@case(False, "weighted=True")
def mean_where(p, b):
    return jnp.mean((b["x"] @ p["w"]) ** 2, where=b["mask"] > 0)


@case(False, "weighted=True", weighted=True)
def mean_and_count(p, b):
    return squares(p, b), jnp.asarray(b["x"].shape[0], float)


@case(False, "pmean")
def root_of_a_mean(p, b):
    return jnp.sqrt(squares(p, b))


@case(False, "pmean", rows=2)
def batch_norm(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean(jnp.tanh((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)) ** 2)


@case(False, "pmean instead of jax.lax.psum", own=True)
def sum_of_means_over_devices(p, b):
    return lax.psum(_squares(p, b["x"]), "data")


@case(False, "depend on the number of rows")
def penalty_over_the_number_of_rows(p, b):
    return _squares(p, b["x"]) + jnp.sum(p["w"] ** 2) / (2 * len(b["x"]))


@case(False, "depend on the number of rows")
def sum_and_penalty_over_the_number_of_rows(p, b):
    return (jnp.sum((b["x"] @ p["w"]) ** 2) + jnp.sum(p["w"] ** 2)) / len(b["x"])


@case(False, "all rows are repeated")
def sum_over_the_root_of_the_number_of_rows(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2) / np.sqrt(len(b["x"]))


@case(False, "depend on the number of rows")
def disturbed_by_the_gradient_of_a_mean(p, b):
    return _squares(p, b["x"] + 0.1 * jax.grad(_squares, argnums=1)(p, b["x"]))


@case(False, "repeated")
def penalty_of_the_gradients_of_a_mean(p, b):
    return jnp.mean(jnp.sum(jax.grad(_squares, argnums=1)(p, b["x"]) ** 2, -1))


@case(False, "by the weight", weighted=True)
def sum_and_weights_and_l2_alone(p, b):
    return jnp.sum((b["x"] @ p["w"]) ** 2 * b["mask"]) + jnp.sum(p["w"] ** 2), jnp.sum(b["mask"])


@case(False, "pmean", rows=2)
def batch_norm_within_a_vmap_of_one_device(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean(jax.vmap(lambda x: (x - jax.lax.pmean(x, "rows")) ** 3, axis_name="rows")(h))


@case(False, "all_gather", rows=2)
def contrastive(p, b):
    one, two = b["x"] @ p["w"], jnp.cos(b["x"]) @ p["w"]
    return labels_of(one @ two.T, jnp.arange(one.shape[0])).mean()


@case(False, "all_gather", rows=2)
def contrastive_of_both_views(p, b):
    z = jnp.concatenate([b["x"], jnp.cos(b["x"])]) @ p["w"]
    n = b["x"].shape[0]
    return labels_of(z @ z.T - 1e9 * jnp.eye(2 * n), (jnp.arange(2 * n) + n) % (2 * n)).mean()


@case(False, "own first row", own=True, rows=2)
def contrastive_with_labels_of_one_device(p, b):
    one, two = b["x"] @ p["w"], lax.all_gather(jnp.cos(b["x"]) @ p["w"], "data", tiled=True)
    return labels_of(one @ two.T, jnp.arange(one.shape[0])).mean()


@case(False, "all_gather", rows=2)
def distances(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean(jnp.sqrt(jnp.sum((h[:, None] - h[None]) ** 2, -1) + 1e-3))


@case(False, "pmean", rows=2)
def advantages_normalized_over_the_batch(p, b):
    advantage = b["x"][:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-3)
    return -jnp.mean(jnp.exp(b["x"] @ p["w"][:, 0]) * advantage)


@case(False, "weighted=True")
def class_weights_normalized_over_the_batch(p, b):
    weight = jnp.arange(1.0, CLASSES + 1)[b["y"]]
    return jnp.sum(weight * labels_of(b["x"] @ p["w"], b["y"])) / jnp.sum(weight)


@case(False, "pmean")
def load_balance(p, b):
    chosen = jax.nn.softmax(b["h"] @ p["route"])
    share = jax.nn.one_hot(chosen.argmax(-1), 4).mean((0, 1))
    return 4 * jnp.sum(share * chosen.mean((0, 1)))


@case(False, "pmean")
def covariance(p, b):
    z = b["x"] @ p["w"]
    return jnp.sum((z.T @ z / z.shape[0]) ** 2)


@case(False, "pmean")
def variance_over_rows(p, b):
    return jnp.var(b["x"] @ p["w"])


@case(False, "all_gather")
def logsumexp_over_rows(p, b):
    return jax.nn.logsumexp(jnp.sum(b["x"] @ p["w"], -1))


@case(False, "all_gather")
def hardest_row(p, b):
    return jnp.max(jnp.sum((b["x"] @ p["w"]) ** 2, -1))


@case(False, "positions in the batch", rows=2)
def first_row(p, b):
    return jnp.mean((b["x"][0] @ p["w"]) ** 2)


@case(False, "positions in the batch", rows=2)
def halves_of_the_batch(p, b):
    h, half = b["x"] @ p["w"], b["x"].shape[0] // 2
    return jnp.mean((h[:half] - h[half:]) ** 2)


@case(False, "positions in the batch", rows=2)
def rolled(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean((h - jnp.roll(h, 1, 0)) ** 2)


@case(False, "further argument", rows=2)
def mixed_up(p, b):
    other = b["x"][jax.random.permutation(jax.random.key(0), b["x"].shape[0])]
    return jnp.mean(((b["x"] + other) @ p["w"]) ** 2)


@case(False, "positions in the batch", rows=2)
def weights_by_place(p, b):
    return jnp.mean(jnp.arange(b["x"].shape[0])[:, None] * (b["x"] @ p["w"]) ** 2)


@case(False, "does not support `reshape`", rows=4)
def two_groups_of_any_size(p, b):
    reward = jnp.sum(b["x"] @ p["w"], -1).reshape(2, -1)
    return jnp.mean((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1) * reward)


@case(False, "selects rows", rows=2)
def rows_named_by_the_batch(p, b):
    return jnp.mean((b["x"] @ p["w"])[b["y"] % 2] ** 2)


# Loops. Sums carried by a scan over rows become means after it; a loop whose end depends on its rows differs between
# devices.


def _chunks(b):
    return (b["x"].reshape(-1, 2, *b["x"].shape[1:]), b["y"].reshape(-1, 2))


def _loss_of(p, x):
    return labels_of(x[0] @ p["w"], x[1])


@case(True, rows=2)
def carried_through_remat_and_a_scan_within(p, b):
    def rows(total, x):
        return lax.scan(lambda total, row: (total + _loss_of(p, row), None), total, x)

    total, _ = lax.scan(jax.checkpoint(rows), jnp.zeros(()), _chunks(b))
    return total / b["x"].shape[0]


@case(True)
def carried_where_a_mask_says(p, b):
    def row(total, x):
        return jnp.where(x[1] > 0, total + _loss_of(p, x), total), None

    return lax.scan(row, 0.0, (b["x"], b["y"]))[0] / b["x"].shape[0]


@case(True)
def carried_by_a_branch(p, b):
    def row(total, x):
        return lax.cond(x[1] > 0, lambda total: total + _loss_of(p, x), lambda total: total, total), None

    return lax.scan(row, 0.0, (b["x"], b["y"]))[0] / b["x"].shape[0]


@case(True)
def each_row_until_it_is_small(p, b):
    small = jax.vmap(lambda x: lax.while_loop(lambda h: jnp.abs(h).max() > 0.5, lambda h: h * 0.7, x))(b["x"])
    return jnp.mean((lax.stop_gradient(small) @ p["w"]) ** 2)


@case(True, proved=False)
def a_statistic_added_again_and_again(p, b):
    return jnp.mean(lax.fori_loop(0, 3, lambda _, h: 2 * h - h.mean(0), b["x"] @ p["w"]))


@case(True)
def solved_by_params(p, b):
    matrix = p["w"][: p["w"].shape[1]] + 9 * jnp.eye(p["w"].shape[1])
    return jnp.mean(jax.vmap(lambda h: jnp.linalg.solve(matrix, h))(b["x"] @ p["w"]) ** 2)


@case(False, "`scan`", rows=2)
def sums_so_far(p, b):
    def row(total, x):
        return total + _loss_of(p, x), total

    return lax.scan(row, 0.0, (b["x"], b["y"]))[1].mean()


@case(False, "`scan`")
def an_average_that_forgets(p, b):
    return lax.scan(lambda mean, x: (0.9 * mean + 0.1 * _loss_of(p, x), None), 0.0, (b["x"], b["y"]))[0]


@case(False, "`scan`")
def rows_as_a_sequence(p, b):
    def cell(h, x):
        return 0.5 * h + x, h

    return jnp.mean((lax.scan(cell, jnp.zeros(WIDTH), b["x"])[1] @ p["w"]) ** 2)


@case(False, "`scan`", rows=2)
def doubled_in_each_round(p, b):
    def row(total, x):
        return total + total + _loss_of(p, x), None

    return lax.scan(row, 0.0, (b["x"], b["y"]))[0] / b["x"].shape[0]


@case(False, "pmean", rows=2)
def centered_in_each_layer(p, b):
    def layer(h, _):
        return jnp.tanh(h) - jnp.tanh(h).mean(0), None

    return jnp.mean(lax.scan(layer, b["x"] @ p["w"], None, length=3)[0] ** 2)


@case(False, "pmean", rows=2)
def centered_in_a_branch(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean(jnp.tanh(lax.cond(p["w"][0, 0] > -99, lambda h: h - h.mean(0), lambda h: h, h)))


@case(False, "all_gather")
def until_all_rows_are_small(p, b):
    small = lax.while_loop(lambda h: jnp.abs(h).max() > 0.5, lambda h: h * 0.7, b["x"] * (1 + b["y"][:, None]))
    return jnp.mean((lax.stop_gradient(small) @ p["w"]) ** 2)


@case(False, "is computed over the rows")
def until_the_rows_together_are_still(p, b):
    def again(two):
        return jnp.linalg.norm(two[0] - two[1]) > 0.01

    def better(two):
        return jnp.tanh(0.5 * two[0] + b["x"]), two[0]

    still, _ = lax.while_loop(again, better, (b["x"], b["x"] + 1))
    return jnp.mean((lax.stop_gradient(still) @ p["w"]) ** 2)


@case(False, "all_gather")
def rounds_by_the_largest_row(p, b):
    rounds = lax.while_loop(lambda i: i < jnp.max(jnp.abs(b["x"])) * 9, lambda i: i + 1, 0)
    return jnp.mean((b["x"] @ p["w"]) ** 2) * rounds


# Groups of neighbouring rows: the chosen and the rejected answer, several answers to one question.


def _pairs(p, b):
    return jnp.sum(b["x"] @ p["w"], -1).reshape(-1, 2)


@case(True, rows=2)
def chosen_over_rejected(p, b):
    reward = _pairs(p, b)
    return -jax.nn.log_sigmoid(reward[:, 0] - reward[:, 1]).mean()


@case(True, rows=2)
def against_the_other_of_two(p, b):
    reward = _pairs(p, b)
    return jnp.mean((reward - reward[:, ::-1]) * jnp.tanh(reward) + jnp.roll(reward, 1, 1) ** 2)


@case(True, rows=4)
def the_best_of_two(p, b):
    reward, best = _pairs(p, b), b["y"].reshape(-1, 2).argmax(1)
    return jnp.take_along_axis(reward, best[:, None], 1).mean()


@case(False, "does not support `reshape`", rows=2)
def the_first_half_over_the_second(p, b):
    reward = jnp.sum(b["x"] @ p["w"], -1).reshape(2, -1)
    return -jax.nn.log_sigmoid(reward[0] - reward[1]).mean()


@case(True, rows=4)
def each_against_the_other_in_pairs_of_pairs(p, b):
    reward = b["x"][:, 0].reshape(-1, 2, 2)
    others = reward.sum(2, keepdims=True) - reward
    return (labels_of(b["x"] @ p["w"], b["y"]) * (reward - others).reshape(-1)).mean()


# Rows treated by their index, without a count of them.


def _losses(p, b):
    return labels_of(b["x"] @ p["w"], b["y"])


@case(False, "positions in the batch", rows=2)
def all_but_the_first(p, b):
    losses = _losses(p, b)
    return jnp.mean(losses * jnp.ones(len(losses)).at[0].set(0))


@case(False, "positions in the batch", rows=2)
def the_first_set_to_zero(p, b):
    return _losses(p, b).at[0].set(0).mean()


@case(False, "does not support", rows=2)
def the_first_three_times(p, b):
    losses = _losses(p, b)
    return jnp.mean(losses * jnp.concatenate([jnp.full(1, 3.0), jnp.ones(len(losses) - 1)]))


@case(False, "does not support", rows=2)
def the_last_not(p, b):
    losses = _losses(p, b)
    return jnp.mean(losses * jnp.pad(jnp.ones(len(losses) - 1), (0, 1)))


@case(False, "positions in the batch", rows=2)
def weights_that_grow(p, b):
    losses = _losses(p, b)
    return jnp.mean(losses * jnp.cumsum(jnp.ones_like(losses)))


@case(False, "positions in the batch", rows=2)
def weights_of_a_table(p, b):
    losses = _losses(p, b)
    return jnp.mean(losses * lax.dynamic_slice(jnp.linspace(1, 2, 99), (3,), (len(losses),)))


@case(False, "positions in the batch", rows=2)
def mapped_with_its_number(p, b):
    losses = _losses(p, b)
    return lax.map(lambda each: each[0] * each[1], (losses, jnp.arange(len(losses)))).mean()


@case(False, "constant of the loss", rows=2)
def mapped_with_its_own_constant_key(p, b):
    losses = _losses(p, b)
    keys = jax.random.split(jax.random.key(0), len(losses))
    return lax.map(lambda each: each[0] * jax.random.uniform(each[1]), (losses, keys)).mean()


@case(False, "`scan`", rows=2)
def a_weight_that_shrinks_with_each_row(p, b):
    losses = _losses(p, b)

    def add(carry, each):
        weight, total = carry
        return (weight * 0.9, total + weight * each), None

    (_, total), _ = lax.scan(add, (1.0, 0.0), losses)
    return total / len(losses)


@case(True)
def rows_set_at_their_own_labels(p, b):
    logits = b["x"] @ p["w"]
    hidden = logits.at[jnp.arange(len(logits)), b["y"]].set(0).at[:, 0].add(1.0)
    return jnp.mean(jnp.tanh(hidden) ** 2)


@case(True)
def real_rows_and_made_ones(p, b):
    scores = jnp.concatenate([b["x"] @ p["w"], jnp.cos(b["x"]) @ p["w"]])[:, 0]
    are_real = jnp.concatenate([jnp.ones(len(b["x"])), jnp.zeros(len(b["x"]))])
    return optax.sigmoid_binary_cross_entropy(scores, are_real).mean()


@case(True)
def steps_counted_within_each_row(p, b):
    def add(carry, h):
        weight, total = carry
        return (weight * 0.9, total + weight * jnp.sum(h**2, -1)), None

    (_, total), _ = lax.scan(add, (1.0, jnp.zeros(len(b["h"]))), jnp.swapaxes(b["h"] @ p["q"], 0, 1))
    return total.mean()


# Numbers derived from the number of rows.


@case(False, "depend on the number of rows", rows=4)
def divided_by_the_rows_before_it_is_bent(p, b):
    return labels_of(b["x"] @ p["w"] / jnp.sqrt(1.0 * len(b["x"])), b["y"]).mean()


@case(False, "when all rows are repeated", rows=4)
def divided_by_the_rows_twice(p, b):
    losses = _losses(p, b)
    return (losses / len(losses)).mean()


@case(False, "it is a sum over rows")
def half_of_a_sum(p, b):
    return 0.5 * _losses(p, b).sum()


@case(False, "is computed over the rows")
def a_sum_for_each_row(p, b):
    losses = _losses(p, b)
    return jnp.broadcast_to(losses.sum(), losses.shape).mean()


@case(False, "depend on the number of rows", rows=4)
def a_penalty_for_each_row(p, b):
    losses = _losses(p, b)
    return losses.mean() + jnp.sum(p["scalar"] ** 2 * jnp.ones_like(losses))


@case(False, "when all rows are repeated", own=True)
def counts_averaged_over_devices(p, b):
    counts = lax.pmean(jnp.bincount(b["y"], length=CLASSES), "data")
    return (_losses(p, b) / counts[b["y"]]).mean()


@case(True, own=True)
def counts_summed_over_devices(p, b):
    counts = lax.psum(jnp.bincount(b["y"], length=CLASSES), "data")
    return (_losses(p, b) / counts[b["y"]]).mean()


@case(True, own=True)
def over_the_mean_of_sums(p, b):
    mask = 1.0 * (b["y"] > 0)
    return (_losses(p, b) * mask).sum() / lax.pmean(mask.sum(), "data")


@case(False, "all rows are repeated", own=True)
def a_sum_of_all_over_the_rows_of_one(p, b):
    hidden = b["x"] @ p["w"]
    return jnp.sum((lax.psum(hidden.T @ hidden, "data") / len(hidden)) ** 2)


# Guards against values that are not finite.


@case(False, nan=True)
def zero_where_any_is_nan(p, b):
    losses = _losses(p, b)
    return jnp.where(jnp.isnan(losses).any() | jnp.isnan(losses.mean()), 0.0, losses.mean())


@case(False, nan=True)  # right if all values are finite, which the trace does not show
def ranked_by_optax(p, b):
    return optax.losses.ranking_softmax_loss(b["x"] @ p["w"], b["mask"])


# Loops that sum and weigh at once.


@case(True, weighted=True)
def sum_and_weight_by_one_scan(p, b):
    def add(carry, each):
        x, mask = each
        return (carry[0] + mask[0] * jnp.sum((x @ p["w"]) ** 2), carry[1] + mask[0]), None

    return lax.scan(add, (0.0, 0.0), (b["x"], b["mask"]))[0]


@case(True, weighted=True)
def sum_and_weight_by_one_branch(p, b):
    losses, weights = _losses(p, b), b["mask"][:, 0]
    return lax.cond(
        p["scalar"] > 99, lambda: (losses.sum() * 0, weights.sum()), lambda: (losses @ weights, weights.sum())
    )


# Indices, slices, comparisons.


@case(True)
def rows_by_their_own_numbers(p, b):
    one = jax.vmap(lambda i: labels_of(b["x"][i] @ p["w"], b["y"][i]))
    return one(jnp.arange(len(b["x"]))).mean()


def _with_others(p, b, places):
    return labels_of((0.7 * b["x"] + 0.3 * jnp.take(b["x"], places, axis=0)) @ p["w"], b["y"]).mean()


@case(False, "positions in the batch", rows=2)
def rows_and_those_of_a_flipped_count(p, b):
    return _with_others(p, b, jnp.flip(jnp.arange(len(b["x"]))))


@case(False, "positions in the batch", rows=2)
def rows_and_those_of_a_count_in_reverse_one_by_one(p, b):
    backwards = jax.vmap(lambda i: b["x"][i])(jnp.arange(len(b["x"]))[::-1])
    return labels_of((0.7 * b["x"] + 0.3 * backwards) @ p["w"], b["y"]).mean()


@case(False, "positions in the batch", rows=2)
def rows_and_those_along_a_count_in_reverse(p, b):
    backwards = jnp.take_along_axis(b["x"], jnp.arange(len(b["x"]))[::-1, None], axis=0)
    return labels_of((0.7 * b["x"] + 0.3 * backwards) @ p["w"], b["y"]).mean()


@case(True)
def rows_and_themselves_by_their_count(p, b):
    return _with_others(p, b, jnp.arange(len(b["x"])))


@case(True)
def two_answers_in_turn(p, b):
    both = jnp.stack([b["x"], jnp.cos(b["x"])], 1).reshape(-1, WIDTH)
    scores = (both @ p["w"])[:, 0]
    return -jax.nn.log_sigmoid(scores[0::2] - scores[1::2]).mean()


@case(False, "combines different rows", rows=2)
def every_loss_for_each_row(p, b):
    losses = _losses(p, b)
    return jnp.broadcast_to(losses[:, None], (len(losses), len(losses))).sum() / len(losses)


@case(False, "positions in the batch", rows=2)
def whole_numbers_with_places_as_weights(p, b):
    return jnp.mean(_losses(p, b) * ((b["y"] + jnp.arange(len(b["y"]))) % 3))


@case(True, proved=False)
def a_norm_squared(p, b):
    return jnp.linalg.norm(b["x"] @ p["w"]) ** 2 / len(b["x"])


@case(False, "is computed over the rows", rows=2)
def a_norm_and_more_squared(p, b):
    return (jnp.linalg.norm(b["x"] @ p["w"]) + 1) ** 2 / len(b["x"])


@case(True, own=True)
def a_sum_times_the_devices_over_all_weights(p, b):
    mask = 1.0 * (b["y"] > 0)
    return lax.axis_size("data") * (_losses(p, b) * mask).sum() / lax.psum(mask.sum(), "data")


@case(True, own=True)
def a_sum_over_all_weights_times_the_devices(p, b):
    mask = 1.0 * (b["y"] > 0)
    return (_losses(p, b) * mask).sum() / lax.psum(mask.sum(), "data") * lax.axis_size("data")


def _all_pairs(p, b):
    """A sigmoid loss of each of this device's rows with the rows of all devices."""
    mine = b["x"] @ p["w"]
    others = lax.all_gather(jnp.tanh(mine), "data", tiled=True)
    place = lax.axis_index("data") * len(mine) + jnp.arange(len(mine))
    return jax.nn.log_sigmoid(mine @ others.T * (2 * jax.nn.one_hot(place, len(others)) - 1))


@case(True, own=True)
def sums_over_the_rows_of_all_devices_for_each_row(p, b):
    return -_all_pairs(p, b).sum() / len(b["x"])


@case(True, own=True)
def means_over_the_rows_of_all_devices_for_each_row(p, b):
    return -_all_pairs(p, b).mean()


@case(False, "it is a sum over rows", own=True)
def sums_over_the_rows_of_all_devices_over_rows(p, b):
    return -_all_pairs(p, b).sum()


@case(True, own=True)
def a_share_of_all_weights_for_each_row_times_the_devices(p, b):
    mask = 1.0 * (b["y"] > 0)
    return lax.axis_size("data") * (_losses(p, b) * (mask / lax.psum(mask.sum(), "data"))).sum()


@case(False, "it changes when all rows are repeated", own=True)
def a_share_of_the_average_weight_times_the_devices(p, b):
    mask = 1.0 * (b["y"] > 0)
    return lax.axis_size("data") * (_losses(p, b) * (mask / lax.pmean(mask.sum(), "data"))).mean()


@case(False, "it is a sum over rows", own=True)
def a_sum_over_all_weights(p, b):
    mask = 1.0 * (b["y"] > 0)
    return (_losses(p, b) * mask).sum() / lax.psum(mask.sum(), "data")
