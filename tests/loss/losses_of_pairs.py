"""Losses of survival, ranking, transport, processes, contrast, each as its author writes it, for one device."""
# ruff: noqa: E731

import jax
import jax.numpy as jnp
import optax
from field_cases import case
from jax import lax

P = lambda rng: {"w": rng.normal(size=(6, 8)) / 3, "b": rng.normal(size=8), "v": rng.normal(size=(8,))}


def B(rng, n):
    return {
        "x": rng.normal(size=(n, 6)),
        "y": rng.integers(0, 8, n),
        "t": rng.exponential(size=n) + 0.1,
        "e": rng.integers(0, 2, n),
        "z": rng.normal(size=n),
    }


def risk(p, b):
    return jnp.tanh(b["x"] @ p["w"] + p["b"]) @ p["v"]


# survival
@case(P, B, mean=False)
def cox(p, b):
    r = risk(p, b)
    order = jnp.argsort(-b["t"])
    r = r[order]
    e = b["e"][order]
    lc = lax.cumlogsumexp(r)
    return -jnp.sum((r - lc) * e) / jnp.maximum(e.sum(), 1)


@case(P, B, mean=False)
def breslow(p, b):
    r = risk(p, b)
    at = b["t"][None] >= b["t"][:, None]
    return -jnp.mean(b["e"] * (r - jnp.log(jnp.where(at, jnp.exp(r)[None], 0).sum(1))))


@case(P, B, mean=True)
def discrete_hazard(p, b):
    hz = jax.nn.sigmoid(b["x"] @ p["w"] + p["b"])
    k = b["y"]
    surv = jnp.cumsum(jnp.log1p(-hz), 1)
    idx = jnp.arange(len(k))
    ll = jnp.where(b["e"] == 1, jnp.log(hz[idx, k]), 0) + jnp.where(k > 0, surv[idx, jnp.maximum(k - 1, 0)], 0)
    return -ll.mean()


@case(P, B, mean=True)
def weibull(p, b):
    lam = jax.nn.softplus(risk(p, b))
    k = jax.nn.softplus(p["b"][0])
    return -jnp.mean(b["e"] * (jnp.log(k * lam) + (k - 1) * jnp.log(lam * b["t"])) - (lam * b["t"]) ** k)


# ranking
@case(P, B, mean=False)
def listnet(p, b):
    s = risk(p, b)
    return -jnp.sum(jax.nn.softmax(b["z"]) * jax.nn.log_softmax(s))


@case(P, B, mean=True)
def listnet_perrow(p, b):
    s = b["x"] @ p["w"]
    return -jnp.mean(jnp.sum(jax.nn.softmax(b["x"] @ jnp.ones((6, 8))) * jax.nn.log_softmax(s), -1))


@case(P, B, mean=False)
def lambdarank(p, b):
    s = risk(p, b)
    y = b["y"]
    d = s[:, None] - s[None]
    rk = jnp.argsort(jnp.argsort(-s))
    gain = 2.0**y - 1
    dl = jnp.abs((gain[:, None] - gain[None]) * (1 / jnp.log2(2.0 + rk)[:, None] - 1 / jnp.log2(2.0 + rk)[None]))
    return jnp.sum(jnp.where(y[:, None] > y[None], lax.stop_gradient(dl) * jax.nn.softplus(-d), 0)) / len(y) ** 2


@case(P, B, mean=False)
def pairhinge(p, b):
    s = risk(p, b)
    return jnp.mean(jnp.maximum(0, 1 - (s[:, None] - s[None]) * jnp.sign(b["z"][:, None] - b["z"][None])))


@case(P, B, mean=False)
def approx_ndcg(p, b):
    s = risk(p, b)
    rk = 1 + jnp.sum(jax.nn.sigmoid(s[None] - s[:, None]), 1) - 0.5
    dcg = jnp.sum((2.0 ** b["y"] - 1) / jnp.log2(1 + rk))
    ide = jnp.sum(jnp.sort(2.0 ** b["y"] - 1)[::-1] / jnp.log2(2.0 + jnp.arange(len(s))))
    return 1 - dcg / ide


@case(P, B, mean=True)
def ndcg_slate(p, b):
    s = b["x"] @ p["w"]
    rel = jnp.cos(b["x"] @ jnp.ones((6, 8)) + jnp.arange(8.0))
    rk = 1 + jnp.sum(jax.nn.sigmoid(s[:, None] - s[:, :, None]), -1) - 0.5
    return jnp.mean(
        1
        - jnp.sum(rel / jnp.log2(1 + rk), -1)
        / jnp.sum(jnp.sort(jnp.abs(rel), -1)[:, ::-1] / jnp.log2(2.0 + jnp.arange(8)), -1)
    )


# Optimal transport
def cost(p, b):
    u = b["x"] @ p["w"]
    v = jnp.cos(b["x"] @ p["w"] * 2) + b["z"][:, None]
    return jnp.sum((u[:, None] - v[None]) ** 2, -1)


@case(P, B, mean=False)
def sinkhorn_fori(p, b):
    C = cost(p, b)
    n = C.shape[0]
    K = -C

    def body(i, fg):
        f, g = fg
        f = -jax.nn.logsumexp(K + g[None], 1) - jnp.log(n)
        g = -jax.nn.logsumexp(K + f[:, None], 0) - jnp.log(n)
        return f, g

    f, g = lax.fori_loop(0, 5, body, (jnp.zeros(n), jnp.zeros(n)))
    return jnp.sum(jnp.exp(f[:, None] + g[None] + K) * C)


@case(P, B, mean=False)
def sinkhorn_while(p, b):
    C = lax.stop_gradient(cost(p, b))
    n = C.shape[0]
    K = -C

    def body(c):
        f, g, i, _ = c
        f = -jax.nn.logsumexp(K + g[None], 1)
        g2 = -jax.nn.logsumexp(K + f[:, None], 0)
        return f, g2, i + 1, jnp.abs(g2 - g).max()

    f, g, _, _ = lax.while_loop(lambda c: (c[3] > 1e-3) & (c[2] < 20), body, (jnp.zeros(n), jnp.zeros(n), 0, 1.0))
    T = lax.stop_gradient(jnp.exp(f[:, None] + g[None] + K))
    return jnp.sum(T * cost(p, b)) / n


@case(P, B, mean=True)
def sinkhorn_perrow(p, b):
    def one(x):
        C = (jnp.outer(x, jnp.ones(8)) @ jnp.eye(8) - p["w"]) ** 2
        f, g = lax.fori_loop(
            0,
            4,
            lambda i, c: (-jax.nn.logsumexp(-C + c[1][None], 1), -jax.nn.logsumexp(-C + c[0][:, None], 0)),
            (jnp.zeros(6), jnp.zeros(8)),
        )
        return jnp.sum(jnp.exp(f[:, None] + g[None] - C) * C)

    return jnp.mean(jax.vmap(one)(b["x"]))


@case(P, B, mean=False)
def sliced_w(p, b):
    u = jnp.sort(b["x"] @ p["w"], 0)
    v = jnp.sort(jnp.tanh(b["x"]) @ p["w"] * 2, 0)
    return jnp.mean((u - v) ** 2)


# GP
@case(P, B, mean=False)
def gp_nll(p, b):
    h = b["x"] @ p["w"]
    K = jnp.exp(-0.5 * jnp.sum((h[:, None] - h[None]) ** 2, -1)) + 0.1 * jnp.eye(len(h))
    L = jnp.linalg.cholesky(K)
    a = jax.scipy.linalg.cho_solve((L, True), b["z"])
    return (0.5 * b["z"] @ a + jnp.log(jnp.diag(L)).sum()) / len(h)


@case(P, B, mean=False)
def dpp(p, b):
    h = b["x"] @ p["w"]
    return -jnp.linalg.slogdet(h @ h.T + jnp.eye(len(h)))[1]


@case(P, B, mean=False)
def blr_evidence(p, b):
    h = jnp.tanh(b["x"] @ p["w"])
    A = h.T @ h / len(h) + jnp.eye(8)
    m = jnp.linalg.solve(A, h.T @ b["z"] / len(h))
    return jnp.mean((h @ m - b["z"]) ** 2) + jnp.linalg.slogdet(A)[1]


@case(P, B, mean=False)
def mmd(p, b):
    h = b["x"] @ p["w"]
    g = b["z"][:, None] * jnp.ones(8)
    k = lambda a, c: jnp.exp(-jnp.sum((a[:, None] - c[None]) ** 2, -1) / 8).mean()
    return k(h, h) + k(g, g) - 2 * k(h, g)


@case(P, B, mean=False)
def coral(p, b):
    h = b["x"] @ p["w"]
    C = jnp.cov(h.T)
    return jnp.sum((C - jnp.eye(8)) ** 2)


@case(P, B, mean=False)
def hsic(p, b):
    h = b["x"] @ p["w"]
    n = len(h)
    K = h @ h.T
    L = jnp.outer(b["z"], b["z"])
    H = jnp.eye(n) - 1 / n
    return jnp.trace(K @ H @ L @ H) / (n - 1) ** 2


# contrastive
def two(p, b):
    n = lambda u: u / jnp.linalg.norm(u, axis=-1, keepdims=True)
    return n(b["x"] @ p["w"]), n(jnp.sin(b["x"]) @ p["w"] + p["b"])


@case(P, B, mean=False)
def simclr(p, b):
    a, c = two(p, b)
    z = jnp.concatenate([a, c])
    n = len(a)
    s = z @ z.T / 0.5 - 1e9 * jnp.eye(2 * n)
    t = jnp.concatenate([jnp.arange(n) + n, jnp.arange(n)])
    return optax.softmax_cross_entropy_with_integer_labels(s, t).mean()


@case(P, B, mean=False)
def clip(p, b):
    a, c = two(p, b)
    s = a @ c.T * jnp.exp(p["v"][0])
    l = jnp.arange(len(a))
    ce = optax.softmax_cross_entropy_with_integer_labels
    return (ce(s, l).mean() + ce(s.T, l).mean()) / 2


@case(P, B, mean=False)
def siglip(p, b):
    a, c = two(p, b)
    s = a @ c.T * 10
    l = 2 * jnp.eye(len(a)) - 1
    return -jnp.sum(jax.nn.log_sigmoid(l * s)) / len(a)


@case(P, B, mean=False)
def supcon(p, b):
    a, _ = two(p, b)
    n = len(a)
    s = a @ a.T - 1e9 * jnp.eye(n)
    m = (b["y"][:, None] == b["y"][None]) * (1 - jnp.eye(n))
    lp = jax.nn.log_softmax(s)
    return -jnp.mean((m * lp).sum(1) / jnp.maximum(m.sum(1), 1))


@case(P, B, mean=True, args=lambda r: (r.normal(size=(8, 20)),))
def moco(p, b, q):
    a, c = two(p, b)
    pos = jnp.sum(a * lax.stop_gradient(c), -1, keepdims=True)
    neg = a @ q
    lo = jnp.concatenate([pos, neg], 1) / 0.2
    return optax.softmax_cross_entropy_with_integer_labels(lo, jnp.zeros(len(a), int)).mean()


@case(P, B, mean=False, aux=True, args=lambda r: (r.normal(size=(40, 8)),), ms=(1,))
def moco_queue(p, b, q):
    a, c = two(p, b)
    pos = jnp.sum(a * lax.stop_gradient(c), -1, keepdims=True)
    neg = a @ q.T
    lo = jnp.concatenate([pos, neg], 1) / 0.2
    return -jax.nn.log_softmax(lo)[:, 0].mean(), jnp.concatenate([lax.stop_gradient(c), q])[:40]


@case(P, B, mean=True)
def byol(p, b):
    a, c = two(p, b)
    return jnp.mean(2 - 2 * jnp.sum(a * lax.stop_gradient(c), -1)) + jnp.mean(
        2 - 2 * jnp.sum(c * lax.stop_gradient(a), -1)
    )


@case(P, B, mean=False)
def barlow(p, b):
    a, c = two(p, b)
    f = lambda h: (h - h.mean(0)) / h.std(0)
    C = f(a).T @ f(c) / len(a)
    return jnp.sum((C - jnp.eye(8)) ** 2)


@case(P, B, mean=False)
def vicreg(p, b):
    a, c = two(p, b)
    f = lambda h: jnp.mean(jax.nn.relu(1 - jnp.sqrt(h.var(0) + 1e-4)))
    return jnp.mean((a - c) ** 2) + f(a) + f(c)


@case(P, B, mean=False)
def uniformity(p, b):
    a, _ = two(p, b)
    d = jnp.sum((a[:, None] - a[None]) ** 2, -1)
    i = jnp.triu_indices(len(a), 1)
    return jnp.log(jnp.exp(-2 * d[i]).mean())


@case(P, B, mean=False)
def dino(p, b):
    a, c = two(p, b)
    t = jax.nn.softmax((c - c.mean(0)) / 0.1)
    return -jnp.mean(jnp.sum(lax.stop_gradient(t) * jax.nn.log_softmax(a), -1))


@case(P, B, mean=False)
def semihard(p, b):
    a, _ = two(p, b)
    d = jnp.sum((a[:, None] - a[None]) ** 2, -1)
    same = b["y"][:, None] == b["y"][None]
    pos = jnp.where(same, d, -1).max(1)
    neg = jnp.where(~same & (d > pos[:, None]), d, 1e3).min(1)
    return jnp.maximum(pos - neg + 0.2, 0).mean()


@case(P, B, mean=True)
def triplet_given(p, b):
    f = lambda x: x @ p["w"]
    a, q, n = f(b["x"]), f(jnp.sin(b["x"])), f(jnp.cos(b["x"]))
    return jnp.maximum(jnp.sum((a - q) ** 2, -1) - jnp.sum((a - n) ** 2, -1) + 1, 0).mean()


@case(P, B, mean=False)
def npair_roll(p, b):
    a, c = two(p, b)
    return jnp.mean(jax.nn.softplus(jnp.sum(a * jnp.roll(c, 1, 0), -1) - jnp.sum(a * c, -1)))
