"""Losses of many fields, as their authors write them, under every strategy: they equal one device's."""

import warnings

import jax
import jax.numpy as jnp
import losses_of_agents  # noqa: F401 (it keeps its losses)
import losses_of_pairs  # noqa: F401
import numpy as np
import optax
import pytest
from field_cases import CASES
from oracle import assert_close

import jaxshard

ROWS, DEVICES = 16, 8
IN_CI = ["cox", "gp_nll", "simclr", "vicreg", "ppo_norm", "gae_rows"]


def parts_of(batch, m):
    """The microbatches: the i-th has the i-th part of each device's rows."""

    def part(x, i):
        return x.reshape(DEVICES, m, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])

    return [jax.tree.map(lambda x, i=i: part(x, i), batch) for i in range(m)]


def on_one_device(loss, params, batch, args, aux, weighted, m):
    def pair(p, b):
        found = loss(p, b, *args)
        found = found[0] if aux else found
        total, weight = found if weighted else (found, 1.0)
        return total, jax.lax.stop_gradient(jnp.asarray(weight, float))

    run = jax.jit(jax.value_and_grad(pair, has_aux=True))
    each = [run(params, part) for part in parts_of(batch, m)]
    weight = sum(w for (_, w), _ in each)
    return jax.tree.map(lambda *xs: sum(xs) / weight, *[(total, grads) for (total, _), grads in each])


def check(name, strategy, m):
    loss, params_of, batch_of, args_of, aux, weighted, _ = CASES[name]
    rng = np.random.default_rng(0)
    params = jax.tree.map(np.asarray, params_of(rng))
    batch, args = batch_of(np.random.default_rng(100), ROWS), args_of(rng) if callable(args_of) else args_of
    mesh = jaxshard.make_mesh(replica=2) if strategy == "hsdp" else jaxshard.make_mesh()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(cannot be sharded|all rows at once)")
        opt = getattr(jaxshard, strategy)(optax.sgd(0.1), mesh)
        run = jaxshard.value_and_grad(loss, opt, microbatches=m, has_aux=aux, weighted=weighted)
        value, grads = run(opt.place(params), batch, *args)
    got = (value[0] if aux else value, grads)
    assert_close(got, on_one_device(loss, params, batch, args, aux, weighted, m), 1e-10)


@pytest.mark.parametrize("name", IN_CI)
def test_a_few_of_them(x64, name):
    check(name, "zero3", 2)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize(("name", "m"), [(name, m) for name, case in CASES.items() for m in case[-1]])
def test_all_of_them(x64, name, strategy, m):
    check(name, strategy, m)
