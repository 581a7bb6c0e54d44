"""A user's own step: its arguments, and a word if it sends far more than ZeRO has to."""

import functools
import inspect
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.inspect.sources import frames
from jaxshard.inspect.traffic import Collective, inputs_of, text_of
from jaxshard.programs.source import place_of
from jaxshard.system.text import size_in_words

_LOSS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "loss") + os.sep
_LEAST = 2**20  # bytes


class Argument(NamedTuple):
    """A leaf of an argument of a step.

    Attributes:
      path: the argument's name and its names in it, joined by slashes.
      shape, dtype: of the global array.
      spec: its PartitionSpec, an entry for each dim that it names; None if the compiler is to choose.
      bytes: on each device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...] | None
    bytes: int


class OwnStep(NamedTuple):
    """A step that is not jaxshard's: a function, jitted or not, and the arguments of a call: arrays or shapes."""

    step: Any
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, step: Any, *arguments: Any) -> "OwnStep":
        """Raises ValueError for a step, or an argument, that JAX cannot trace."""
        if isinstance(step, jax.stages.Compiled):
            raise ValueError("the step is already compiled: return the function, or jax.jit of it")
        bound = (*step.args, *step.keywords.values()) if isinstance(step, functools.partial) else ()
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(bound)):
            raise ValueError("the step is a functools.partial that holds shapes: pass them as arguments of the step")
        names = _names(step, len(arguments))
        for name, argument in zip(names, () if hasattr(step, "lower") else arguments, strict=False):
            kinds = {type(x).__name__ for x in jax.tree.leaves(argument) if not _is_traceable(x)}
            if kinds:
                raise ValueError(
                    f"{name} of the step holds a {min(kinds)}, which JAX does not trace: let the step close over it, "
                    "or return jax.jit(step, static_argnums=...)"
                )
        return cls(step, arguments)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of most devices that an argument is on; raises ValueError if none is on a mesh of devices."""
        shardings = [x.sharding for _, x in self._leaves() if isinstance(x.sharding, jax.sharding.NamedSharding)]
        meshes = [sharding.mesh for sharding in shardings if isinstance(sharding.mesh, jax.sharding.Mesh)]
        if not meshes:
            raise ValueError(
                "no argument of this step of your own is on a mesh: place params with opt.place(params), create the "
                "state with opt.init(params), and shard the batch with jaxshard.shard_batch(batch, opt)"
            )
        return max(meshes, key=lambda mesh: mesh.size)

    def lower(self) -> jax.stages.Lowered:
        """The step, lowered for its arguments."""
        step = self.step if hasattr(self.step, "lower") else jax.jit(self.step)
        return step.lower(*self.arguments)

    def listed(self) -> tuple[Argument, ...]:
        """All leaves, in order."""
        return tuple(_argument(path, x) for path, x in self._leaves())

    def _leaves(self) -> list[tuple[str, Any]]:
        names = _names(self.step, len(self.arguments))
        found = jax.tree.leaves_with_path(dict(enumerate(self.arguments)))
        paths = [(path[0].key, jax.tree_util.keystr(path[1:], simple=True, separator="/"), x) for path, x in found]
        return [("/".join(filter(None, (names[i], path))), x) for i, path, x in paths if hasattr(x, "sharding")]


def _is_traceable(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def _names(step: Any, num: int) -> list[str]:
    """The names of a function's first arguments."""
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        names = []
    return [*names, *(f"argument {i}" for i in range(len(names), num))]


def _argument(path: str, x: Any) -> Argument:
    spec = tuple(x.sharding.spec) if isinstance(x.sharding, jax.sharding.NamedSharding) else None
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    itemsize = getattr(x.dtype, "itemsize", 0)
    return Argument(path, tuple(x.shape), str(x.dtype), spec, math.prod(shape) * itemsize)


def excess(compiled: jax.stages.Compiled, found: Sequence[Collective]) -> str:
    """A sentence if a step sends twice what ZeRO-3 sends with one microbatch: how much, where, and the remedy; else "".

    A step is a program of (params, ..., batch, ...): the last argument that is cut is cut by rows, over all devices.
    That of `jaxshard.train_step`, or with gradients of `jaxshard.value_and_grad`, makes its own: it is left out.
    """
    inputs = inputs_of(compiled)
    num = next((num for leaves in inputs[:0:-1] if (num := _num_devices_of_rows(leaves)) > 0), 1)
    if num < 2 or not found:
        return ""
    params = sum(math.prod(x.shape) * x.dtype.itemsize for x, _ in inputs[0] if jnp.issubdtype(x.dtype, jnp.inexact))
    formula, sent = 3 * params * (num - 1) / num, sum(each.wire_bytes for each in found)
    if sent < max(2 * formula, _LEAST) or not params or f'"{_LOSS}' in text_of(compiled):
        return ""
    most = max(found, key=lambda each: each.wire_bytes)
    stacks = frames(compiled).get(most.name, [])
    line = next(filter(None, (place_of((f.file, f.line) for f in stack).own for stack in stacks)), "")
    most_at = f"{most.kind} at {line}" if line else most.kind
    return (
        f"this step sends {size_in_words(sent)} from each device, {sent / formula:.1f} times what ZeRO-3 sends for "
        f"these params with one microbatch ({size_in_words(formula)}); most of it by {most_at}. Unless it has that "
        "many microbatches, XLA has sharded activations by features. Keep each row on its device, at the start of each "
        "block: x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data'))); or compute loss and gradients "
        "with jaxshard.value_and_grad(loss_fn, opt)(params, batch), which needs no constraint"
    )


def _num_devices_of_rows(leaves: Sequence[tuple[Any, jax.sharding.Sharding | None]]) -> int:
    """The number of devices, if the rows of an argument's first leaf are cut over all; 0 if it is whole; else 1."""
    x, sharding = next(iter(leaves), (None, None))
    if x is None or sharding is None or sharding.is_fully_replicated:
        return 0
    if not isinstance(sharding, jax.sharding.NamedSharding) or not x.ndim or not x.shape[0]:
        return 1
    parts = x.shape[0] // sharding.shard_shape(x.shape)[0]
    return parts if parts == len(sharding.device_set) else 1
