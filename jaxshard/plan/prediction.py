"""What one training step will cost each device, before anything is compiled.

A step is traced on an abstract mesh, so no device is needed and nothing is materialised, and its program is read
(`from_jaxpr`, `costs`). What the compilers say of the same step is in `aot.report`; `docs/plan.md` sets both side by
side.
"""

import copy
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import shape_of
from jaxshard.core.layout import Layout
from jaxshard.core.precision import like
from jaxshard.core.specs import local_shape
from jaxshard.core.step import TrainStep
from jaxshard.hardware.chips import Chip
from jaxshard.mesh import platform_of, torus_dims
from jaxshard.plan import from_jaxpr, program, xla_tpu
from jaxshard.plan.costs import Costs, costs_of
from jaxshard.plan.roofline import Seconds, roofline

KINDS = ("params", "grads", "state", "batch", "activations")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one step is going to cost each device.

    Attributes:
      axes: devices along each axis of the mesh.
      platform: "cpu", "gpu" or "tpu".
      at_rest: bytes of params, grads (while they are summed), state and batch.
      costs: arithmetic, traffic and the peak.
      layout: where each leaf lies, and why.
    """

    axes: dict[str, int]
    platform: str
    at_rest: dict[str, int]
    costs: Costs
    layout: Layout

    @property
    def peak_bytes(self) -> int:
        """The most memory at once."""
        return self.costs.peak_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes sent per step."""
        return self.costs.wire_bytes

    @property
    def memory(self) -> dict[str, int]:
        """The peak in parts: what is at rest, and the rest of it, "activations" (and all else that comes and goes)."""
        held = dict(self.at_rest)
        left = self._temporary_bytes
        held["grads"] = max(0, min(held["grads"], left))
        return held | {"activations": max(0, left - held["grads"])}

    @property
    def _temporary_bytes(self) -> int:
        """Of the peak, what comes and goes in a step."""
        return self.peak_bytes - sum(self.at_rest[kind] for kind in ("params", "state", "batch"))

    def seconds(self, chip: Chip) -> Seconds:
        """The step's roofline on devices of this kind."""
        return roofline(self.costs, self.axes, self._temporary_bytes, chip)

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {
            "axes": self.axes,
            "platform": self.platform,
            "at_rest": self.at_rest,
            "memory": self.memory,
            "peak_bytes": self.peak_bytes,
            "wire_bytes": self.wire_bytes,
            "wire_bytes_by_axes": self.costs.wire_bytes_by_axes(),
            "flops": self.costs.flops,
            "memory_traffic_bytes": {"products": self.costs.product_bytes, "all else": self.costs.memory_bytes},
            "trips_known": self.costs.trips_known,
            "leaves": [list(row) for row in self.layout.rows()],
        }


def predict(step: TrainStep, params: Any, batch: Any, *args: Any) -> Prediction:
    """What `step(params, opt.init(params), batch, *args)` costs each device. Nothing is compiled or allocated.

    Args:
      step: of `train_step`, its optimizer on a mesh or an abstract mesh (`mesh.abstract_mesh`).
      params, batch, args: arrays or `ShapeDtypeStruct`s, as the step takes them.

    Returns:
      A `Prediction`, for the platform of the optimizer's mesh.

    Raises:
      ValueError: the optimizer leaves axes to XLA (`auto_axes`), whose choices only compiling shows.
    """
    return _Traced(step, params, batch, args).prediction()


class AnyRows:
    """`predict` for any number of rows, of one trace: in it each device has a number of rows that divides nothing else.

    Args:
      step, params, batch, args: as for `predict`.
      unit: what each device's rows of a microbatch are a multiple of; a pipeline's `num_microbatches`, say.
    """

    _PRIMES = (1009, 2003, 4001, 8009)

    def __init__(self, step: TrainStep, params: Any, batch: Any, *args: Any, unit: int = 1):
        self._given = (step, params, batch, args)
        options = step.loss.options
        self.parts = options.engine.num_batch_shards * options.microbatches * unit
        sizes = {d for x in jax.tree.leaves((params, args)) for d in np.shape(x)}
        sizes |= {d for x in jax.tree.leaves(batch) for d in np.shape(x)[1:]}
        self._prime = next(p for p in self._PRIMES if all(d % p or not d for d in sizes))
        self._traced = _Traced(step, params, _with_rows(batch, self._prime * self.parts), args)

    def at(self, rows: int) -> Prediction:
        """With so many rows a step, over all devices and microbatches.

        Raises:
          ValueError: `rows` is no multiple of `parts`.
        """
        if rows % self.parts or rows < 1:
            raise ValueError(f"plan: {rows} rows are no multiple of {self.parts}, devices x microbatches")
        batch = _with_rows(self._given[2], rows)
        return self._traced.rescaled(self._prime, rows // self.parts, batch).prediction()


def _with_rows(batch: Any, rows: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), shape_of(x).dtype), batch)


class _Traced:
    """A step as it runs on each device of its platform."""

    def __init__(self, step: TrainStep, params: Any, batch: Any, args: Any):
        engine = step.loss.options.engine
        if engine.config.auto_axes:
            raise ValueError(
                f"plan: auto_axes={engine.config.auto_axes} leave it to XLA what moves, so it cannot be told before "
                "compiling: read the compiled step (jaxshard.inspect.report, jaxshard.aot.report)"
            )
        self.engine, self.batch = engine, batch
        self.platform = platform_of(engine.mesh)
        params = jax.tree.map(shape_of, params)
        state = engine.abstract_state(params)
        self.layout = engine.layout(params, strict=True)
        held = jax.tree.leaves(tuple(engine.trees(params)[::2]), is_leaf=lambda x: isinstance(x, P))
        specs = held + [P(engine.batch_axes)] * len(jax.tree.leaves(batch)) + [P()] * len(jax.tree.leaves(args))
        traced = step.trace(params, state, batch, *args)
        block = from_jaxpr.written_out(traced.jaxpr, specs, engine.sizes, self.platform)
        self.block = (
            xla_tpu.as_on_tpu(block, engine.mesh.size, torus_dims(engine.mesh)) if self.platform == "tpu" else block
        )
        self.donated = [step.donate] * len(held) + [False] * (len(specs) - len(held))

    def rescaled(self, old: int, new: int, batch: Any) -> "_Traced":
        """For a batch of other rows."""
        other = copy.copy(self)
        other.block, other.batch = program.rescaled(self.block, old, new), batch
        return other

    def prediction(self) -> Prediction:
        costs = costs_of(self.block, self.donated, self.platform)
        at_rest = _at_rest(self.layout, self.batch, self.engine)
        return Prediction(self.engine.sizes, self.platform, at_rest, costs, self.layout)


def _at_rest(found: Layout, batch: Any, engine: Any) -> dict[str, int]:
    cuts, held = found.config.cuts, found.bytes_per_device
    grads = 0
    for leaf in found.params:
        shape = local_shape(leaf.shape, found.spec(leaf, cut=cuts.accumulators), found.sizes)
        grads += math.prod(shape) * np.dtype(like(found.config.reduce_dtype, leaf.dtype)).itemsize
    rows = sum(math.prod(x.shape) * shape_of(x).dtype.itemsize for x in jax.tree.leaves(batch))
    return {"params": held["params"], "grads": grads, "state": held["state"], "batch": rows // engine.num_batch_shards}
