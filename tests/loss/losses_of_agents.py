"""Losses of agents, adversaries, codes, diffusion, distillation, each as its author writes it, for one device."""
# ruff: noqa: E731

import jax
import jax.numpy as jnp
import numpy as np
import optax
from field_cases import case
from jax import lax

P = lambda rng: {
    "w": rng.normal(size=(6, 8)) / 3,
    "b": rng.normal(size=8),
    "v": rng.normal(size=(8,)),
    "q": rng.normal(size=(8, 4)),
}
T = 5


def B(rng, n):
    return {
        "o": rng.normal(size=(n, T, 6)),
        "a": rng.integers(0, 4, (n, T)),
        "r": rng.normal(size=(n, T)),
        "d": rng.integers(0, 2, (n, T)),
        "adv": rng.normal(size=n),
        "lp": -np.abs(rng.normal(size=n)),
        "x": rng.normal(size=(n, 6)),
        "u": rng.integers(0, 4, n),
    }


def pi(p, o):
    return jax.nn.log_softmax(jnp.tanh(o @ p["w"] + p["b"]) @ p["q"])


def V(p, o):
    return jnp.tanh(o @ p["w"] + p["b"]) @ p["v"]


@case(P, B, mean=False)
def ppo_norm(p, b):
    adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
    lp = jnp.take_along_axis(pi(p, b["x"]), b["u"][:, None], 1)[:, 0]
    r = jnp.exp(lp - b["lp"])
    return -jnp.minimum(r * adv, jnp.clip(r, 0.8, 1.2) * adv).mean()


@case(P, B, mean=True)
def ppo(p, b):
    adv = b["adv"]
    L = pi(p, b["x"])
    lp = L[jnp.arange(L.shape[0]), b["u"]]
    r = jnp.exp(lp - b["lp"])
    ent = -(jnp.exp(L) * L).sum(-1).mean()
    return (
        -jnp.minimum(r * adv, jnp.clip(r, 0.8, 1.2) * adv).mean()
        + 0.5 * jnp.mean((V(p, b["x"]) - adv) ** 2)
        - 0.01 * ent
    )


@case(P, B, mean=True)
def gae_rows(p, b):
    v = V(p, b["o"])
    nv = jnp.concatenate([v[:, 1:], jnp.zeros_like(v[:, :1])], 1)
    nd = 1 - b["d"]
    delta = b["r"] + 0.99 * nv * nd - v

    def f(c, x):
        dl, m = x
        c = dl + 0.95 * 0.99 * m * c
        return c, c

    _, adv = lax.scan(f, jnp.zeros(v.shape[0]), (delta.T, nd.T), reverse=True)
    adv = lax.stop_gradient(adv.T)
    lp = jnp.take_along_axis(pi(p, b["o"]), b["a"][..., None], -1)[..., 0]
    return -(lp * adv).mean() + ((v - lax.stop_gradient(adv + v)) ** 2).mean()


@case(P, B, mean=False)
def gae_over_rows(p, b):
    v = V(p, b["x"])
    delta = b["adv"] - v

    def f(c, x):
        c = x + 0.9 * c
        return c, c

    _, adv = lax.scan(f, 0.0, delta, reverse=True)
    return jnp.mean(adv**2)


@case(P, B, mean=True)
def vtrace(p, b):
    def one(o, a, r, d):
        v = V(p, o)
        lp = jnp.take_along_axis(pi(p, o), a[:, None], 1)[:, 0]
        rho = jnp.minimum(1, jnp.exp(lp - 1.0))
        g = 0.99 * (1 - d)
        nv = jnp.append(v[1:], 0.0)
        dl = rho * (r + g * nv - v)
        _, e = lax.scan(lambda c, x: ((x[0] + x[1] * x[2] * c),) * 2, 0.0, (dl, g, rho), reverse=True)
        vs = lax.stop_gradient(e + v)
        return 0.5 * jnp.mean((vs - v) ** 2) - jnp.mean(
            lp * lax.stop_gradient(rho * (r + g * jnp.append(vs[1:], 0.0) - v))
        )

    return jax.vmap(one)(b["o"], b["a"], b["r"], b["d"]).mean()


@case(P, B, mean=True)
def vtrace_assoc(p, b):
    v = V(p, b["o"])
    g = 0.9 * (1 - b["d"])
    _, y = lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (g, b["r"] - v), axis=1)
    return jnp.mean(y**2)


@case(P, B, mean=True)
def dqn(p, b):
    q = jnp.tanh(b["x"] @ p["w"]) @ p["q"]
    nq = jnp.tanh(b["o"][:, 0] @ p["w"]) @ p["q"]
    t = b["adv"] + 0.9 * (1 - b["d"][:, 0]) * lax.stop_gradient(nq.max(-1))
    return optax.huber_loss(q[jnp.arange(len(q)), b["u"]], t).mean()


@case(P, B, mean=True)
def ddqn_perrow(p, b):
    q = jax.vmap(lambda x, u: (jnp.tanh(x @ p["w"]) @ p["q"])[u])(b["x"], b["u"])
    return jnp.mean((q - b["adv"]) ** 2)


@case(P, B, mean=False)
def reinforce_baseline(p, b):
    lp = pi(p, b["x"])[jnp.arange(len(b["u"])), b["u"]]
    R = b["r"].sum(1)
    return -jnp.mean(lp * (R - R.mean()))


@case(P, B, mean=False)
def rloo(p, b):
    lp = pi(p, b["x"])[jnp.arange(len(b["u"])), b["u"]]
    R = b["r"].sum(1)
    n = len(R)
    return -jnp.mean(lp * (R - (R.sum() - R) / (n - 1)))


@case(P, B, mean=True)
def grpo_group_in_row(p, b):
    R = b["r"]
    A = (R - R.mean(1, keepdims=True)) / (R.std(1, keepdims=True) + 1e-6)
    lp = jnp.take_along_axis(pi(p, b["o"]), b["a"][..., None], -1)[..., 0]
    return -jnp.mean(A * lp)


@case(P, B, mean=None)
def grpo_group_over_rows(p, b):
    R = b["adv"].reshape(-1, 2)
    A = (R - R.mean(1, keepdims=True)) / (R.std(1, keepdims=True) + 1e-6)
    lp = pi(p, b["x"])[jnp.arange(len(b["u"])), b["u"]].reshape(-1, 2)
    return -jnp.mean(A * lp)


@case(P, B, mean=True, aux=True)
def sac(p, b):
    L = pi(p, b["x"])
    q = b["x"] @ p["w"][:, :4]
    al = jnp.exp(p["v"][0])
    ent = -jnp.sum(jnp.exp(L) * L, -1)
    return jnp.mean(jnp.sum(jnp.exp(L) * (lax.stop_gradient(al) * L - q), -1)) + al * lax.stop_gradient(
        ent - 1
    ).mean(), {"ent": ent, "m": ent.mean()}


@case(P, B, mean=False)
def awr_expnorm(p, b):
    lp = pi(p, b["x"])[jnp.arange(len(b["u"])), b["u"]]
    w = jax.nn.softmax(b["adv"])
    return -jnp.sum(w * lp)


@case(P, B, mean=True)
def iql_expectile(p, b):
    u = b["adv"] - V(p, b["x"])
    return jnp.mean(jnp.where(u > 0, 0.7, 0.3) * u**2)


@case(P, B, mean=False)
def timemajor(p, b):
    o = jnp.swapaxes(b["o"], 0, 1)
    h = jnp.tanh(o @ p["w"])
    return jnp.mean((h - h.mean(1, keepdims=True)) ** 2)


@case(P, B, mean=True)
def timemajor_rnn(p, b):
    o = jnp.swapaxes(b["o"], 0, 1)

    def f(h, x):
        h = jnp.tanh(x @ p["w"] + h * p["b"])
        return h, h

    _, hs = lax.scan(f, jnp.zeros((o.shape[1], 8)), o)
    return jnp.mean((hs @ p["v"] - b["r"].T) ** 2)


@case(P, B, mean=True)
def timemajor_rnn_steps(p, b):
    h = jnp.zeros((len(b["x"]), 8))
    L = 0.0
    for t in range(T):
        h = jnp.tanh(b["o"][:, t] @ p["w"] + h * p["b"])
        L += jnp.mean((h @ p["v"] - b["r"][:, t]) ** 2)
    return L / T


# GAN
@case(P, B, mean=True)
def wgan_gp(p, b):
    D = lambda x: jnp.tanh(x @ p["w"]) @ p["v"]
    fake = jnp.sin(b["x"]) * 2
    real = b["x"]
    mix = 0.3 * real + 0.7 * fake
    g = jax.grad(lambda x: D(x).sum())(mix)
    return D(fake).mean() - D(real).mean() + 10 * jnp.mean((jnp.linalg.norm(g, axis=-1) - 1) ** 2)


@case(P, B, mean=False)
def relativistic_avg(p, b):
    D = lambda x: jnp.tanh(x @ p["w"]) @ p["v"]
    f, r = D(jnp.sin(b["x"])), D(b["x"])
    return jax.nn.softplus(-(r - f.mean())).mean() + jax.nn.softplus(f - r.mean()).mean()


@case(P, B, mean=False)
def minibatch_std(p, b):
    h = jnp.tanh(b["x"] @ p["w"])
    s = h.std(0).mean()
    h = jnp.concatenate([h, jnp.broadcast_to(s, (len(h), 1))], 1)
    return jax.nn.softplus(h @ jnp.append(p["v"], 1.0)).mean()


# VQ-VAE
@case(P, B, mean=True)
def vqvae(p, b):
    z = b["x"] @ p["w"]
    cb = p["q"].T
    d = jnp.sum((z[:, None] - cb[None]) ** 2, -1)
    k = d.argmin(1)
    e = cb[k]
    zq = z + lax.stop_gradient(e - z)
    return (
        jnp.mean((zq @ p["w"].T - b["x"]) ** 2)
        + jnp.mean((lax.stop_gradient(z) - e) ** 2)
        + 0.25 * jnp.mean((z - lax.stop_gradient(e)) ** 2)
    )


@case(P, B, mean=False, aux=True)
def vq_usage(p, b):
    z = b["x"] @ p["w"]
    cb = p["q"].T
    d = jnp.sum((z[:, None] - cb[None]) ** 2, -1)
    k = d.argmin(1)
    u = jax.nn.one_hot(k, 4).mean(0)
    return jnp.mean((z - cb[k]) ** 2), {"perp": jnp.exp(-jnp.sum(u * jnp.log(u + 1e-9)))}


@case(P, B, mean=False, aux=True, ms=(1,))
def vq_ema(p, b):
    z = b["x"] @ p["w"]
    cb = p["q"].T
    k = jnp.sum((z[:, None] - cb[None]) ** 2, -1).argmin(1)
    oh = jax.nn.one_hot(k, 4)
    return jnp.mean((z - cb[k]) ** 2), {"n": oh.sum(0), "m": oh.T @ z, "cnt": jnp.bincount(k, length=4)}


# diffusion
def BK(rng, n):
    d = B(rng, n)
    d["key"] = np.asarray(jax.vmap(jax.random.PRNGKey)(np.arange(n) + rng.integers(1000)))
    return d


@case(P, BK, mean=True)
def ddpm(p, b):
    def one(x, k):
        k1, k2 = jax.random.split(k)
        t = jax.random.uniform(k1)
        e = jax.random.normal(k2, x.shape)
        xt = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * e
        return jnp.mean((jnp.tanh(xt @ p["w"] + t) @ p["w"].T - e) ** 2)

    return jax.vmap(one)(b["x"], b["key"]).mean()


@case(P, BK, mean=True)
def dropout_rowkeys(p, b):
    h = b["x"] @ p["w"]
    m = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (8,)))(b["key"])
    return jnp.mean(jnp.where(m, h * 2, 0) ** 2)


@case(P, BK, mean=None)
def key_of_row0(p, b):
    h = b["x"] @ p["w"]
    m = jax.random.bernoulli(b["key"][0], 0.5, h.shape)
    return jnp.mean(jnp.where(m, h * 2, 0) ** 2)


@case(P, BK, mean=True)
def gumbel_rows(p, b):
    g = jax.vmap(lambda k: jax.random.gumbel(k, (4,)))(b["key"])
    s = jax.nn.softmax(pi(p, b["x"]) + g)
    return jnp.mean((s @ p["q"].T) ** 2)


# CTC
def BC(rng, n):
    return {
        "x": rng.normal(size=(n, 9, 6)),
        "l": rng.integers(1, 8, (n, 3)),
        "lp": (rng.random((n, 9)) < 0.1).astype(float),
        "pp": np.zeros((n, 3)),
    }


@case(P, BC, mean=True, rows=(8,))
def ctc(p, b):
    return optax.ctc_loss(b["x"] @ p["w"], b["lp"], b["l"], b["pp"]).mean()


@case(P, BC, mean=None, rows=(8,))
def ctc_sum(p, b):
    return optax.ctc_loss(b["x"] @ p["w"], b["lp"], b["l"], b["pp"]).sum() / b["l"].size


# energy
@case(P, B, mean=True)
def score_match(p, b):
    E = lambda x: jnp.sum(jnp.tanh(x @ p["w"]) * p["v"])
    g = jax.vmap(jax.grad(E))(b["x"])
    H = jax.vmap(lambda x: jnp.trace(jax.hessian(E)(x)))(b["x"])
    return jnp.mean(0.5 * (g**2).sum(-1) - H)


@case(P, B, mean=True)
def cd_langevin(p, b):
    E = lambda x: jnp.tanh(x @ p["w"]) @ p["v"]
    y = lax.fori_loop(0, 3, lambda i, y: y - 0.1 * jax.grad(lambda y: E(y).sum())(y), jnp.sin(b["x"]))
    return E(b["x"]).mean() - E(lax.stop_gradient(y)).mean()


@case(P, B, mean=False)
def langevin_meangrad(p, b):
    E = lambda x: jnp.tanh(x @ p["w"]) @ p["v"]
    y = lax.fori_loop(0, 3, lambda i, y: y - 0.1 * jax.grad(lambda y: E(y).mean())(y), jnp.sin(b["x"]))
    return E(b["x"]).mean() - E(lax.stop_gradient(y)).mean()


@case(P, B, mean=False)
def nce_logz(p, b):
    e = jnp.tanh(b["x"] @ p["w"]) @ p["v"]
    return jax.nn.logsumexp(e) - jnp.log(len(e)) - e.mean()


@case(P, B, mean=False)
def iwae_rows(p, b):
    e = V(p, b["o"])
    return -jnp.mean(jax.nn.logsumexp(e, axis=1) - jnp.log(T)) - jnp.log(jnp.mean(jnp.exp(e)))


@case(P, B, mean=True)
def iwae(p, b):
    e = V(p, b["o"])
    return -jnp.mean(jax.nn.logsumexp(e, axis=1) - jnp.log(T))


@case(P, B, mean=True)
def distill(p, b):
    t = lax.stop_gradient(pi(p, b["x"]))
    s = jax.nn.log_softmax(b["x"] @ p["w"][:, :4] / 2)
    return -4 * jnp.mean(jnp.sum(jnp.exp(t) * s, -1))


@case(P, B, mean=False)
def rkd(p, b):
    f = lambda h: (lambda d: d / d.mean())(jnp.sqrt(jnp.sum((h[:, None] - h[None]) ** 2, -1) + 1e-6))
    return jnp.mean((f(b["x"] @ p["w"]) - f(b["x"])) ** 2)


# meta
@case(P, B, mean=True)
def maml_rows(p, b):
    def task(o, r):
        L = lambda q, o, r: jnp.mean((jnp.tanh(o @ q["w"]) @ q["v"] - r) ** 2)
        g = jax.grad(L)(p, o[:3], r[:3])
        q = jax.tree.map(lambda a, c: a - 0.1 * c, p, g)
        return L(q, o[3:], r[3:])

    return jax.vmap(task)(b["o"], b["r"]).mean()


@case(P, B, mean=False)
def maml_batch(p, b):
    L = lambda q: jnp.mean((jnp.tanh(b["x"] @ q["w"]) @ q["v"] - b["adv"]) ** 2)
    q = jax.tree.map(lambda a, c: a - 0.1 * c, p, jax.grad(L)(p))
    return L(q)


@case(P, B, mean=False)
def maml_half(p, b):
    n = len(b["x"]) // 2
    L = lambda q, s: jnp.mean((jnp.tanh(b["x"][s] @ q["w"]) @ q["v"] - b["adv"][s]) ** 2)
    q = jax.tree.map(lambda a, c: a - 0.1 * c, p, jax.grad(L)(p, slice(0, n)))
    return L(q, slice(n, None))


@case(P, B, mean=False)
def sam(p, b):
    L = lambda q: jnp.mean((jnp.tanh(b["x"] @ q["w"]) @ q["v"] - b["adv"]) ** 2)
    g = jax.grad(L)(p)
    n = optax.tree.norm(g)
    return L(jax.tree.map(lambda a, c: a + 0.05 * lax.stop_gradient(c / n), p, g))


@case(P, B, mean=False)
def gradpen_batch(p, b):
    L = lambda q: jnp.mean((jnp.tanh(b["x"] @ q["w"]) @ q["v"] - b["adv"]) ** 2)
    return L(p) + 0.1 * optax.tree.norm(jax.grad(L)(p)) ** 2


@case(P, B, mean=True)
def proto_rows(p, b):
    h = b["o"] @ p["w"]
    pr = h[:, :3].mean(1)
    return jnp.mean(jnp.sum((h[:, 3:] - pr[:, None]) ** 2, -1))


# MoE
@case(P, B, mean=False)
def moe(p, b):
    g = jax.nn.softmax(b["x"] @ p["w"][:, :4])
    f = jax.nn.one_hot(g.argmax(-1), 4).mean(0)
    return jnp.mean((jnp.sum(g, -1) - b["adv"]) ** 2) + 4 * jnp.sum(f * g.mean(0))


@case(P, B, mean=False)
def moe_capacity(p, b):
    g = jax.nn.softmax(b["x"] @ p["w"][:, :4])
    oh = jax.nn.one_hot(g.argmax(-1), 4)
    pos = jnp.cumsum(oh, 0) * oh
    keep = (pos <= 4) * oh
    return jnp.mean((keep * g).sum(-1) * b["adv"])


@case(P, B, mean=True)
def moe_zloss(p, b):
    l = b["o"] @ p["w"]
    return jnp.mean(jax.nn.logsumexp(l, -1) ** 2) + jnp.mean(l.max(-1))


@case(P, B, mean=True)
def moe_switch(p, b):
    k = b["u"]
    return jnp.mean(
        jax.vmap(lambda x, k: lax.switch(k, [lambda x, i=i: jnp.tanh(x @ p["w"][:, i]) for i in range(4)], x))(
            b["x"], k
        )
    )


@case(P, B, mean=None)
def expert_choice(p, b):
    s = jax.nn.softmax(b["x"] @ p["w"][:, :4])
    v, i = lax.top_k(s.T, 3)
    return -jnp.mean(v * b["adv"][i])
