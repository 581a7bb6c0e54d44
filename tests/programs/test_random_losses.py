"""Random losses of 40 operations: what is proved to be a mean over rows is one, by its value and by its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.programs.rows.verdict import Question, judge

pytestmark = pytest.mark.usefixtures("x64")
PARTS, ROWS, WIDTH = 3, 4, 4


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@jax.custom_vjp
def doubled(x):
    return x


doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

ROWWISE = {  # (rows, WIDTH) to the same shape
    "tanh": lambda x, p, b: jnp.tanh(x),
    "relu": lambda x, p, b: jax.nn.relu(x),
    "square": lambda x, p, b: x**2,
    "scaled": lambda x, p, b: 0.5 * x,
    "product": lambda x, p, b: x @ p["w"],
    "shifted": lambda x, p, b: x + p["v"],
    "softmax": lambda x, p, b: jax.nn.softmax(x),
    "normalized": lambda x, p, b: x / (1 + jnp.abs(x).sum(-1, keepdims=True)),
    "sorted": lambda x, p, b: jnp.sort(x, -1),
    "cumulated": lambda x, p, b: jnp.cumsum(x, -1),
    "reversed": lambda x, p, b: x[:, ::-1],
    "transposed twice": lambda x, p, b: jnp.tanh(x.T).T,
    "merged": lambda x, p, b: jnp.sin(x.reshape(-1)).reshape(x.shape),
    "time first": lambda x, p, b: jnp.sin(x.T.reshape(-1)).reshape(WIDTH, -1).T,
    "with the batch": lambda x, p, b: x * b["x"],
    "one hot": lambda x, p, b: x * jax.nn.one_hot(b["y"], WIDTH),
    "looked up": lambda x, p, b: x + p["w"][b["y"]],
    "own place": lambda x, p, b: x.at[jnp.arange(len(x)), b["y"]].add(1.0),
    "taken along": lambda x, p, b: x - jnp.take_along_axis(x, b["y"][:, None], 1),
    "chosen": lambda x, p, b: jnp.where(b["y"][:, None] > 1, x, -x),
    "mapped": lambda x, p, b: jax.lax.map(lambda r: jnp.tanh(r) * r.sum(), x),
    "two views": lambda x, p, b: sum(jnp.split(jnp.tanh(jnp.concatenate([x, -x])), 2)),
    "pairs": lambda x, p, b: jnp.repeat(x[::2] - x[1::2], 2, 0),
    "doubled gradient": lambda x, p, b: doubled(x),
    "by a loop": lambda x, p, b: jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), x),
    "remat": lambda x, p, b: jax.checkpoint(lambda h: jnp.sin(h @ p["w"]))(x),
}
MIXING = {
    "centred": lambda x, p, b: x - x.mean(0),
    "by the sum": lambda x, p, b: x * x.sum(),
    "by the largest": lambda x, p, b: x / (1 + jnp.abs(x).max()),
    "rolled": lambda x, p, b: x + jnp.roll(x, 1, 0),
    "upside down": lambda x, p, b: x * x[::-1],
    "sorted rows": lambda x, p, b: x * jnp.sort(x, 0),
    "running": lambda x, p, b: jnp.cumsum(x, 0),
    "all pairs": lambda x, p, b: (x @ x.T) @ x,
    "by place": lambda x, p, b: x * jnp.arange(len(x))[:, None],
    "by count": lambda x, p, b: x / len(x),
    "plus count": lambda x, p, b: x + 1 / len(x),
    "first": lambda x, p, b: x + x[0],
    "halves": lambda x, p, b: x * jnp.concatenate([x[len(x) // 2 :], x[: len(x) // 2]]),
    "chunks": lambda x, p, b: (x.reshape(2, -1, WIDTH) * jnp.arange(2)[:, None, None]).reshape(x.shape),
    "by segment": lambda x, p, b: jax.ops.segment_sum(x, b["y"], WIDTH)[b["y"]],
    "centred gradient": lambda x, p, b: centred(x),
    "clipped gradient": lambda x, p, b: clipped(x),
}
ENDS = {
    "mean": lambda x, p, b: x.mean(),
    "mean of sums": lambda x, p, b: x.sum(-1).mean(),
    "sum over rows": lambda x, p, b: x.sum() / x.shape[0],
    "with a penalty": lambda x, p, b: x.mean() + (p["w"] ** 2).sum(),
    "buckets": lambda x, p, b: jax.ops.segment_sum(x, b["y"], WIDTH).sum() / len(x),
    "by a scan": lambda x, p, b: jax.lax.scan(lambda c, r: (c + r.sum(), None), 0.0, x)[0] / len(x),
    "mean of all and the product": lambda x, p, b: (x.mean(0) @ p["w"]).sum(),
    "sum": lambda x, p, b: x.sum(),
    "root": lambda x, p, b: jnp.sqrt(1 + x.mean() ** 2),
    "masked": lambda x, p, b: (x[:, 0] * b["y"]).sum() / b["y"].sum(),
    "norm": lambda x, p, b: jnp.linalg.norm(x),
    "largest": lambda x, p, b: x.max(),
}


def batch_of(rows):
    rng = np.random.default_rng(rows)
    return {"x": rng.normal(size=(rows, WIDTH)), "y": rng.integers(1, WIDTH, rows)}


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(WIDTH, WIDTH)) / 2, "v": rng.normal(size=WIDTH)}


def random_loss(rng):
    """(names of its operations, the loss): two to six steps, few of which mix rows, and an end."""
    names = [str(rng.choice([*ROWWISE])) for _ in range(rng.integers(2, 6))]
    if rng.random() < 0.4:
        names[rng.integers(len(names))] = str(rng.choice([*MIXING]))
    end = str(rng.choice([*ENDS], p=np.r_[np.full(7, 0.11), np.full(5, 0.046)]))
    steps = [(ROWWISE | MIXING)[name] for name in names]

    def loss(p, b):
        x = b["x"] @ p["w"]
        for step in steps:
            x = step(x, p, b)
        return ENDS[end](x, p, b)

    return (*names, end), loss


def is_proved(loss):
    def trace(rows, *_):
        return jax.make_jaxpr(lambda p, b: (loss(p, b), jnp.ones(())))(params(), batch_of(rows))

    inputs = [False, False, True, True]
    question = Question(trace, ROWS, inputs, [False] * 4, False, False, True, {"data": PARTS}, PARTS)
    verdict = judge(question, trace(ROWS))
    return not verdict.problem and not verdict.unknown


def is_mean(loss):
    """By numbers: the value and the gradients of all rows are the means of those of the parts."""
    whole, p = batch_of(ROWS * PARTS), params()
    parts = [jax.tree.map(lambda x, i=i: x[ROWS * i : ROWS * (i + 1)], whole) for i in range(PARTS)]
    f = jax.value_and_grad(loss)
    of_parts = jax.tree.map(lambda *xs: sum(xs) / PARTS, *(f(p, part) for part in parts))
    pairs = zip(jax.tree.leaves(f(p, whole)), jax.tree.leaves(of_parts), strict=True)
    return all(np.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs)


def counted(seeds):
    proved = 0
    for seed in seeds:
        names, loss = random_loss(np.random.default_rng(seed))
        if is_proved(loss):
            proved += 1
            assert is_mean(loss), names
    return proved


@pytest.mark.parametrize("part", range(4))
def test_what_is_proved_is_a_mean(part):
    assert counted(range(12 * part, 12 * (part + 1)))


@pytest.mark.nightly
def test_2000_losses():
    assert counted(range(1000, 3000)) > 600


@pytest.mark.parametrize("name", MIXING)
def test_each_operation_that_mixes_rows_is_seen(name):
    loss = lambda p, b: jnp.mean(jnp.tanh(MIXING[name](jnp.sin(b["x"] @ p["w"]), p, b)))  # noqa: E731
    assert not is_mean(loss)
    assert not is_proved(loss)


@pytest.mark.parametrize("f", [lambda c, p: c @ p["w"], lambda c, p: jnp.cumsum(c), lambda c, p: 0.9 * c])
def test_a_sum_over_rows_that_each_row_changes_is_none(f):
    """The carry of a scan over rows: anything but adding to it makes a sequence of them."""

    def loss(p, b):
        return jax.lax.scan(lambda c, r: (f(c, p) + r, None), jnp.zeros(WIDTH), jnp.sin(b["x"]))[0].sum() / len(b["x"])

    assert not is_mean(loss)
    assert not is_proved(loss)


@pytest.mark.parametrize("name", ROWWISE)
def test_each_operation_on_rows_is_proved(name):
    loss = lambda p, b: jnp.mean(jnp.tanh(ROWWISE[name](jnp.sin(b["x"] @ p["w"]), p, b)))  # noqa: E731
    assert is_mean(loss)
    assert is_proved(loss)
