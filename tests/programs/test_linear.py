"""What is linear in a statistic of the rows may come before its mean over devices; anything else may not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losses import batch_of, weights

import jaxshard

EIGHT = np.arange(8)
LINEAR = {
    "stack": lambda m: jnp.stack([m, 2 * m]).sum(0),
    "unstack": lambda m: sum(jnp.unstack(m)),
    "split": lambda m: sum(jnp.split(m, 2)),
    "tile": lambda m: jnp.tile(m, 2),
    "repeat": lambda m: jnp.repeat(m, 2),
    "roll": lambda m: jnp.roll(m, 1),
    "pad": lambda m: jnp.pad(m, 2),
    "take": lambda m: jnp.take(m, np.array([0, 1, 0])),
    "where": lambda m: jnp.where(EIGHT > 3, m, 0),
    "at_set": lambda m: jnp.zeros(8).at[3].set(m[2]),
    "at_add": lambda m: jnp.zeros(8).at[np.array([1, 2])].add(m[:2]),
    "buckets": lambda m: jax.ops.segment_sum(m, EIGHT % 3, 3),
    "written_into": lambda m: jax.lax.dynamic_update_slice(jnp.zeros(20), m, (3,)),
    "cumulative": jnp.cumsum,
    "fourier": lambda m: jnp.fft.fft(m).real,
    "convolved": lambda m: jnp.convolve(m, np.ones(3, "f")),
    "windows": lambda m: jax.lax.reduce_window(m, 0.0, jax.lax.add, (2,), (1,), "SAME"),
    "product": lambda m: m @ np.ones((8, 3), "f"),
    "put": jax.device_put,
    "scanned": lambda m: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(8), jnp.stack([m, m]))[0],
}


def told(loss):
    f = jaxshard.value_and_grad(loss, jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxshard.RowsWarning)
        return str(f.layout(weights(), batch_of(32))).splitlines()[-1]


def hidden(p, b):
    return jnp.tanh(b["x"] @ jnp.tile(p["q"], 8)[:, :8])


def added(f, between):
    def loss(p, b):
        h = hidden(p, b)
        return jnp.mean(h**2) + jnp.sum(jnp.sin(between(f(h.mean(0)))))

    return loss


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    assert told(added(LINEAR[name], lambda x: jax.lax.pmean(x, "data"))) == "rows: the loss is a mean over rows"
    assert "pmean" in told(added(LINEAR[name], lambda x: x))


@pytest.mark.parametrize("f", [jnp.square, jnp.cumprod, jnp.sort, jnp.max, jnp.linalg.norm])
def test_not_linear(f):
    assert "pmean" in told(added(f, lambda x: jax.lax.pmean(x, "data")))


def test_rows_move():
    """Copies of rows are those of the same rows; one row taken out is some of the rows."""
    assert told(lambda p, b: jnp.mean(jnp.tile(hidden(p, b), (1, 3)) ** 2)).endswith("is a mean over rows")
    assert told(lambda p, b: jnp.mean(jnp.unstack(hidden(p, b), axis=1)[2] ** 2)).endswith("is a mean over rows")
    assert "XLA partitions it" in told(lambda p, b: jnp.mean(jnp.unstack(hidden(p, b))[0] ** 2))


@pytest.mark.parametrize("loss", ["sorted_and_back", "pooled_by_row", "row_by_row", "in_part"])
def test_what_no_trace_can_tell_sees_all_rows(loss):
    def sorted_and_back(p, b):
        order = jnp.argsort(b["y"])  # by expert
        return jnp.mean(hidden(p, {"x": b["x"][order]})[jnp.argsort(order)] ** 2)

    def pooled_by_row(p, b):
        rows = jnp.repeat(jnp.arange(len(b["x"])), 3)
        return jnp.mean(jax.ops.segment_sum(jnp.repeat(hidden(p, b), 3, 0), rows, len(b["x"])) ** 2)

    def row_by_row(p, b):
        """Each into its place of a mutable array, in a loop."""
        each, x = jax.new_ref(jnp.zeros(len(b["x"]))), hidden(p, b)

        def body(i, _):
            each[i] = jnp.sum(x[i] ** 2)

        jax.lax.fori_loop(0, len(b["x"]), body, None)
        return jnp.mean(each[...])

    def in_part(p, b):
        each = jax.new_ref(jnp.zeros(len(b["x"])))
        each[:2] = jnp.sum(hidden(p, b)[:2] ** 2, -1)
        return jnp.sum(each[...])

    assert told(locals()[loss]).startswith(
        "rows: global view: the loss sees all rows of a microbatch, and XLA partitions it"
    )
