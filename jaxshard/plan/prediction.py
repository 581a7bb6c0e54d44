"""What one training step will cost each device, before anything is compiled.

A step is traced on an abstract mesh, so no device is needed and nothing is materialised, and its program is read
(`from_jaxpr`, `costs`). `aot.report` has the compilers' figures for the same step; `docs/plan.md` sets both side by
side.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import shape_of
from jaxshard.base.types import Jaxpr, Tree, like, local_shape
from jaxshard.hardware.chips import Chip
from jaxshard.layout.layout import Layout
from jaxshard.loss.gradients import LossFunction
from jaxshard.loss.loss_report import Price
from jaxshard.mesh import platform_of, torus_dims, with_auto_axes
from jaxshard.optimizer.sharding import Setup
from jaxshard.plan import from_jaxpr, program, xla_gpu, xla_tpu
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.costs import Costs, Seconds, costs_of, roofline
from jaxshard.step.step import TrainStep, loss_of, with_setup
from jaxshard.system.users_lines import warn

_View: TypeAlias = Literal["local", "global"]
KINDS = ("params", "grads", "state", "batch", "activations")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one step is going to cost each device.

    Attributes:
      axes: devices along each axis of the mesh.
      platform: "cpu", "gpu" or "tpu".
      at_rest: bytes on each device of params, grads (while they are summed), state and batch.
      costs: arithmetic, traffic and the peak.
      layout: where each leaf is placed, and why.
    """

    axes: dict[str, int]
    platform: str
    at_rest: dict[str, int]
    costs: Costs
    layout: Layout

    @property
    def peak_bytes(self) -> int:
        """The most memory at once, in bytes."""
        return self.costs.peak_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per step."""
        return self.costs.wire_bytes

    @property
    def memory(self) -> dict[str, int]:
        """The peak in parts, in bytes: those at rest, and "activations", which is all else that comes and goes."""
        held = dict(self.at_rest)
        left = self._temporary_bytes
        held["grads"] = max(0, min(held["grads"], left))
        return held | {"activations": max(0, left - held["grads"])}

    @property
    def _temporary_bytes(self) -> int:
        """Bytes of the peak that come and go in a step."""
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
            "uncounted_kernels": list(self.costs.uncounted),
            "leaves": [list(row) for row in self.layout.rows()],
        }


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate, what it costs, and what that means on the target."""

    candidate: Candidate
    prediction: Prediction
    target: Target
    largest_batch: int | None = None  # rows per step; None: not asked for
    useful_seconds: float | None = None  # of a step's products, none made twice, at the chip's peak; None: not known

    @property
    def seconds(self) -> Seconds:
        """The least time of a step on the target."""
        return self.prediction.seconds(self.target.chip)

    @property
    def peak_bytes(self) -> int:
        """The most memory at once on each device, in bytes."""
        return self.prediction.peak_bytes

    @property
    def excess_bytes(self) -> float:
        """By how much it is too large for a device; at most 0 if it fits."""
        return self.peak_bytes - self.target.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the target."""
        return self.excess_bytes <= 0

    @property
    def utilization(self) -> float | None:
        """The part of the least time that useful products take at the chip's peak: model FLOPs utilization, MFU."""
        return None if self.useful_seconds is None else self.useful_seconds / self.seconds.total

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and numbers."""
        seconds = {"total": self.seconds.total, "overlapped": self.seconds.overlapped, "bound": self.seconds.bound}
        return {
            "name": self.candidate.name,
            "candidate": dataclasses.asdict(self.candidate),
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "utilization": self.utilization,
            "seconds": dataclasses.asdict(self.seconds) | seconds,
            **self.prediction.to_dict(),
        }


def predict(step: TrainStep, params: Tree, batch: Tree, *args: Tree) -> Prediction:
    """What `step(params, opt.init(params), batch, *args)` costs each device. Nothing is compiled or allocated.

    Args:
      step: of `train_step`, its optimizer on a mesh or an abstract mesh (`mesh.abstract_mesh`).
      params, batch, args: arrays or `ShapeDtypeStruct`s, as the step takes them.

    Returns:
      A `Prediction`, for the platform of the optimizer's mesh.

    Raises:
      ValueError: the optimizer leaves axes to XLA (`auto_axes`), whose choices only compiling shows.
    """
    return LaidOut(step, params, batch, *args).prediction()


class LaidOut:
    """A step's params and state laid out, before its program is traced.

    Args:
      step, params, batch, args: as for `predict`.
    """

    def __init__(self, step: TrainStep, params: Tree, batch: Tree, *args: Tree):
        self.step, self.batch, self.args = step, batch, args
        self.setup = loss_of(step).setup
        self.params = jax.tree.map(shape_of, params)
        self.state = self.setup.abstract_state(self.params)
        self.setup.strictly(self.params)
        self.layout = self.setup.with_state(self.params)

    @property
    def held_bytes(self) -> int:
        """Bytes of params and state on each device."""
        held = self.layout.bytes_per_device
        return held["params"] + held["state"]

    @property
    def specs(self) -> list[P]:
        """The PartitionSpecs of all leaves of params, then of the state."""
        return jax.tree.leaves((self.layout.param_specs, self.layout.state_specs))

    def prediction(self) -> Prediction:
        """See `predict`."""
        return TracedStep(self).prediction()


def block_of(traced: Jaxpr, specs: Sequence[P], setup: Setup) -> tuple[program.Block, str]:
    """(a traced program as it runs on each device of its platform, the platform).

    Args:
      specs: the PartitionSpecs of its inputs.
    """
    if setup.config.auto_axes:
        raise ValueError(
            f"plan: auto_axes={setup.config.auto_axes} lets XLA decide what is sent, so the plan cannot predict it: "
            "inspect the compiled step (jaxshard.inspect.report, jaxshard.aot.report)"
        )
    platform = platform_of(setup.mesh)
    block = from_jaxpr.written_out(traced, specs, setup.sizes, platform)
    if platform == "tpu":
        block = xla_tpu.as_on_tpu(block, setup.mesh.size, torus_dims(setup.mesh))
    if platform == "gpu":
        block = xla_gpu.as_for_cudnn(block)
    return block, platform


def _traced(given: LaidOut) -> jax.stages.Traced:
    """The traced step, on a mesh of Auto axes: the program is the same, and only its specs are to be propagated.

    A loss that needs Explicit axes (`out_sharding=`) is traced on these.
    """
    arguments = (given.params, given.state, given.batch, *given.args)
    if AxisType.Explicit in given.setup.mesh.axis_types:
        setup = dataclasses.replace(given.setup, mesh=with_auto_axes(given.setup.mesh))
        try:
            return with_setup(given.step, setup).trace(*arguments)
        except Exception as error:  # of any type: it is the user's code
            warn(
                f"plan: the step can be traced only on Explicit axes ({type(error).__name__} on Auto ones), where the "
                "plan may count too much traffic; compile it to know (jaxshard.aot.report)"
            )
    return given.step.trace(*arguments)


class TracedStep:
    """A step as it runs on each device of its platform."""

    def __init__(self, given: LaidOut):
        setup = given.setup
        self.setup, self.batch, self.layout = setup, given.batch, given.layout
        held, num_args = given.specs, len(jax.tree.leaves(given.args))
        self.batch_specs = loss_of(given.step).options.cut.specs(given.batch)
        specs = held + self.batch_specs + [P()] * num_args
        traced = _traced(given)
        self.block, self.platform = block_of(traced.jaxpr, specs, setup)
        self.donated = [given.step.donate] * len(held) + [False] * (len(specs) - len(held))

    def rescaled(self, old: int, new: int, batch: Tree) -> "TracedStep":
        """The same for a batch of other rows: `new` on each device in place of `old`."""
        other = copy.copy(self)
        other.block, other.batch = program.rescaled(self.block, old, new), batch
        return other

    def prediction(self) -> Prediction:
        costs = costs_of(self.block, self.donated, self.platform)
        return Prediction(self.setup.sizes, self.platform, self._at_rest(), costs, self.layout)

    def _at_rest(self) -> dict[str, int]:
        """Bytes on each device, by kind; gradients while they are summed."""
        layout, held = self.layout, self.layout.bytes_per_device
        grads = 0
        for leaf in layout.params:
            if leaf.frozen:
                continue
            shape = local_shape(leaf.shape, leaf.grads.spec, layout.sizes)
            grads += math.prod(shape) * np.dtype(like(layout.config.reduce_dtype, leaf.dtype)).itemsize
        leaves = zip(jax.tree.leaves(self.batch), self.batch_specs, strict=True)
        parts = ((shape_of(x), local_shape(x.shape, spec, layout.sizes)) for x, spec in leaves)
        batch = sum(math.prod(shape) * x.dtype.itemsize for x, shape in parts)
        return {"params": held["params"], "grads": grads, "state": held["state"], "batch": batch}


# The two views of a loss: on each device's rows, and on all rows at once.


def price_of(loss: LossFunction, params: Tree, batch: Tree, args: Sequence[Tree]) -> Price | None:
    """What a loss and its gradients cost in both views; None if either cannot be traced or read.

    Takes arrays or shapes, and compiles nothing.
    """
    try:
        local, whole = _costs(loss, "local", params, batch, args), _costs(loss, "global", params, batch, args)
    except Exception:  # of any type: it is the user's own code, perhaps written for one view alone
        return None
    return Price((local.wire_bytes, whole.wire_bytes), (local.peak_bytes, whole.peak_bytes))


def _costs(loss: LossFunction, view: _View, params: Tree, batch: Tree, args: Sequence[Tree]) -> Costs:
    setup = dataclasses.replace(loss.setup, mesh=with_auto_axes(loss.setup.mesh))
    run = LossFunction(dataclasses.replace(loss.options, loss_view=view, setup=setup))
    inputs = jax.tree.map(shape_of, (params, batch, *args))
    traced = jax.jit(lambda *xs: tuple(run.measure(xs[0], xs[1], xs[2:]))).trace(*inputs).jaxpr  # pyright: ignore
    others = run.options.cut.specs(batch) + [P()] * len(jax.tree.leaves(args))
    specs = [*jax.tree.leaves(setup.layout(inputs[0]).param_specs), *others]
    block, platform = block_of(traced, specs, setup)
    return costs_of(block, [False] * len(specs), platform)
