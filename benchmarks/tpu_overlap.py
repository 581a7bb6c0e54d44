"""What XLA for TPU runs beside matrix products: collectives of a scan of layers, by shard_map and by shardings alone.

    python benchmarks/tpu_overlap.py [--options JSON ...]

Compiles for chips that are not here, libtpu must be installed; nothing runs. Without `--options`, with those that are
said to change it.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.apps.bench.step import figures

Arrays = tuple[jax.Array, Any]
LAYERS, WIDTH, ROWS = 6, 2048, 8192
CUT, BY_ROWS = P(None, None, "data"), P("data")
OPTIONS = (
    {},
    {
        "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
        "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    },
    {"xla_tpu_enable_ici_rs_pipelining": True, "xla_tpu_enable_ici_ag_pipelining": True},
    {
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_enable_async_reduce_scatter_fusion": True,
    },
)


def scattered(y: jax.Array, each: Arrays) -> Arrays:
    """A layer that reduce-scatters the gradient of its weight; its other product does not need it."""
    w, x = each
    return y @ w, lax.psum_scatter(x.T @ y, "data", scatter_dimension=1, tiled=True)


def scattered_behind(both: Arrays, each: Arrays) -> tuple[Arrays, jax.Array]:
    """The same, with the gradient of the layer before, which no product needs."""
    (y, gradient), (w, x) = both, each
    return (y @ w, x.T @ y), lax.psum_scatter(gradient, "data", scatter_dimension=1, tiled=True)


def gathered(y: jax.Array, each: Arrays) -> tuple[jax.Array, None]:
    """A layer that gathers its weight."""
    return jax.nn.relu(y @ lax.all_gather(each[0], "data", axis=1, tiled=True)), None


def gathered_ahead(both: Arrays, each: Arrays) -> tuple[Arrays, None]:
    """A layer that gathers the weight of the next one."""
    y, w = both
    return (jax.nn.relu(y @ w), lax.all_gather(each[0], "data", axis=1, tiled=True)), None


def of_shard_map(mesh: jax.sharding.Mesh, layer: Callable[..., Any]) -> jax.stages.Lowered:
    """A scan of layers inside `jax.shard_map`."""
    ahead, scatters = layer in (scattered_behind, gathered_ahead), layer in (scattered, scattered_behind)

    def body(ws: jax.Array, xs: jax.Array, y: jax.Array) -> Any:
        return lax.scan(layer, (y, jnp.zeros((WIDTH, WIDTH), y.dtype)) if ahead else y, (ws, xs))

    outs = ((BY_ROWS, P()) if ahead else BY_ROWS, CUT if scatters else P())
    ws = P() if scatters else CUT
    return lowered(
        mesh,
        jax.shard_map(body, mesh=mesh, in_specs=(ws, P(None, "data"), BY_ROWS), out_specs=outs, check_vma=False),
        ws,
    )


def by_shardings(mesh: jax.sharding.Mesh, *, scatters: bool) -> jax.stages.Lowered:
    """The same scan by sharding constraints."""

    def at(x: jax.Array, *spec: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(y: jax.Array, each: Arrays) -> Arrays:
        w, x = each
        return at(y @ w, "data"), at(x.T @ y, None, "data") if scatters else None

    return lowered(mesh, lambda ws, xs, y: lax.scan(layer, y, (ws, xs)), P() if scatters else CUT)


def lowered(mesh: jax.sharding.Mesh, program: Callable[..., Any], weights: P) -> jax.stages.Lowered:
    """The program for weights, kept activations and activations."""
    of = {(LAYERS, WIDTH, WIDTH): weights, (LAYERS, ROWS, WIDTH): P(None, "data"), (ROWS, WIDTH): BY_ROWS}
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in of.items()]
    return jax.jit(program).lower(*shapes)


def main() -> None:
    """Prints a line for each program and each set of options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machine", default="v5e:2x4")
    parser.add_argument("--options", nargs="*", type=json.loads, default=OPTIONS, help="sets of compiler options")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    mesh = jax.sharding.Mesh(jaxshard.aot.devices(jaxshard.aot.machine(asked.machine)), ("data",))
    programs = {f.__name__: of_shard_map(mesh, f) for f in (scattered, scattered_behind, gathered, gathered_ahead)}
    programs |= {
        f"by shardings, {'scattered' if s else 'gathered'}": by_shardings(mesh, scatters=s) for s in (True, False)
    }
    for name, program in programs.items():
        for options in asked.options:
            print(f"{name:24} {figures(program.compile(compiler_options=options))}; {json.dumps(options)}", flush=True)


if __name__ == "__main__":
    main()
