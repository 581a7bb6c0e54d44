"""`jaxshard plan MODULE:FUNCTION`: a user's own step, built again under each strategy and mesh."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxshard.apps.config.devices import simulate_cpus
from jaxshard.base.tree import shape_of
from jaxshard.base.types import AnyMesh, Tree
from jaxshard.cli.made import checked
from jaxshard.layout.options import Config
from jaxshard.optimizer.sharding import Setup
from jaxshard.plan import choices, search
from jaxshard.plan.choices import Candidate, Target
from jaxshard.plan.prediction import Row, predict
from jaxshard.plan.search import Built
from jaxshard.step.step import TrainStep, loss_of, with_setup
from jaxshard.system.users_code import blamed, called

_WANTED = "it must return (step, params, batch, *more), where step = jaxshard.train_step(loss_fn, opt)"
_AXES_OF_A_STRATEGY = ("params_axes", "grads_axes", "state_axes", "regather", "zero", "state_memory")
_LEVELS = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def read(what: str, rows: int | None = None) -> OwnStep:
    """Calls the user's function.

    Args:
      what: "module:function".
      rows: of a step's batch, in place of those that the function gives.

    Raises:
      ValueError: the function does not exist, or returns something else.
      UsersError: the user's code fails.
    """
    simulate_cpus(None)
    step, params, batch, *more = checked(what, called(what, offered={"devices": None}), _WANTED)
    with blamed(what):
        params, batch = jax.tree.map(shape_of, (params, batch))
    found = OwnStep(what, step, params, batch, tuple(more))
    return found if rows is None else found.with_rows(rows)


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step that a user's function made, with the shapes of its params and batch, and its further arguments."""

    what: str
    step: TrainStep
    params: Tree
    batch: Tree
    more: tuple[Tree, ...]

    @property
    def _setup(self) -> Setup:
        return loss_of(self.step).setup

    @property
    def _model_axes(self) -> dict[str, int]:
        """The axes larger than 1 that split no batch."""
        return {a: n for a, n in self._setup.sizes.items() if a not in self._setup.batch_axes and n > 1}

    @property
    def rows(self) -> int:
        """The rows of a batch."""
        return jax.tree.leaves(self.batch)[0].shape[0]

    @property
    def title(self) -> str:
        """For pictures."""
        return self.what

    @property
    def heading(self) -> str:
        """The batch, in words."""
        return f"{self.rows} rows a step"

    def with_rows(self, rows: int) -> OwnStep:
        """The same with another number of rows; leaves of the batch have them as their first dim."""
        return dataclasses.replace(self, batch=search.with_rows(self.batch, rows))

    def own(self, target: Target) -> Candidate:
        """Its own strategy on the target's devices; only the (first) data axis changes its size.

        Raises:
          ValueError: the other axes do not divide the devices.
        """
        setup, config = self._setup, self._setup.config
        replica = math.prod(setup.sizes[axis] for axis in config.replica_axes if axis in setup.sizes)
        pipeline = self._model_axes.get("pipeline", 1)
        tensor = math.prod(self._model_axes.values()) // pipeline
        data, rest = divmod(target.num_devices, tensor * pipeline * replica)
        if rest or not data:
            sizes = ", ".join(f"{axis} {size}" for axis, size in setup.sizes.items())
            raise ValueError(
                f"{self.what} makes a mesh of {sizes}, whose axes other than data do not divide {target.num_devices} "
                f"devices: give a machine with a multiple of {tensor * pipeline * replica} devices"
            )
        return Candidate(
            config.strategy,
            data,
            tensor,
            pipeline,
            replica,
            zero=config.zero,
            microbatches=loss_of(self.step).options.microbatches,
            state_axes=config.state_axes or (),
            state_memory=config.state_memory if isinstance(config.state_memory, str) else "device",
        )

    def candidates(self, names: Sequence[str], target: Target) -> list[Candidate]:
        """The strategies of --strategies; by default all over the data axes, and the step's own."""
        mine = self.own(target)
        found = self._over_data(target, mine.microbatches)
        if not names:
            return found if mine in found else [*found, mine]
        named = {"hfsdp" if c.state_axes else _short(c): c for c in found} | {"own": mine}
        if missing := [name for name in names if name not in named]:
            raise ValueError(
                f"--strategies {' '.join(missing)}: available for this step and machine: {', '.join(named)}"
            )
        return [named[name] for name in names]

    def _over_data(self, target: Target, microbatches: int) -> list[Candidate]:
        if not self._model_axes:
            return choices.side_by_side(target, microbatches)
        mine = self.own(target)
        same = {"replica": 1, "data": mine.data * mine.replica, "state_axes": (), "microbatches": microbatches}
        return [dataclasses.replace(mine, strategy="hybrid", zero=zero, **same) for zero in (0, 1, 2, 3)]

    def to_try(self, target: Target) -> list[Candidate]:
        """For --fit: all strategies, with 1, 4 and 16 microbatches if the rows allow, and the step's own."""
        mine = self.own(target)
        counts = sorted({mine.microbatches, *(m for m in (1, 4, 16) if self.rows % m == 0)})
        return list(dict.fromkeys([one for m in counts for one in self._over_data(target, m)] + [mine]))

    def unit(self, candidate: Candidate) -> int:
        """A device's rows of a microbatch are a multiple of it."""
        del candidate
        return 1

    def row(self, candidate: Candidate, target: Target) -> Row:
        """The prediction, and the largest batch that fits, if the step can be traced with other rows."""
        built = self.build(candidate, candidate.mesh(target))
        with blamed(self.what):
            prediction = predict(*built)
        with warnings.catch_warnings(action="ignore"):  # they are about other numbers of rows
            try:
                largest = search.largest_batch(search.AnyRows(*built), target)
            except Exception:  # of any type: it is the user's code, perhaps written for one number of rows
                largest = None
        return Row(candidate, prediction, target, largest)

    def build(self, candidate: Candidate, mesh: AnyMesh) -> Built:
        """The step under another strategy, on a mesh with the user's axes.

        Raises:
          ValueError: the strategy's options or the mesh do not allow it.
        """
        setup = self._setup
        options = _options(setup.config, candidate)
        renamed = dataclasses.replace(candidate, state_axes=options.pop("state_axes", ()))
        loss_fn, given = loss_of(self.step).options.loss_fn, (self.params, self.batch, *self.more)
        bare, *_ = search.building(loss_fn, setup.inner, *given, **options)(renamed, self._named(candidate, mesh))
        return (with_setup(self.step, loss_of(bare).setup, candidate.microbatches), *given)

    def _named(self, candidate: Candidate, mesh: AnyMesh) -> AnyMesh:
        """A mesh of these devices with the user's axes: the first data axis takes what the others leave."""
        setup, config = self._setup, self._setup.config
        sizes = dict(setup.sizes)
        if candidate.replica > 1 and not any(axis in sizes for axis in config.replica_axes):
            sizes = {config.replica_axes[0]: candidate.replica, **sizes}
        replicas = [axis for axis in config.replica_axes if axis in sizes]
        sizes |= dict.fromkeys(replicas, 1)
        sizes |= dict.fromkeys(replicas[:1], candidate.replica)
        first, *others = config.data_axes
        inner = math.prod(sizes[axis] for axis in others)
        if candidate.data % inner:
            raise ValueError(f"the data axes {others} of {inner} devices do not divide {candidate.data}")
        return _reshaped(mesh, sizes | {first: candidate.data // inner}, setup.mesh.axis_types[0])


def _short(candidate: Candidate) -> str:
    return candidate.strategy if candidate.zero is None else _LEVELS[candidate.zero]


def _options(config: Config, candidate: Candidate) -> dict[str, Any]:
    """The user's options that hold under another strategy, and the candidate's."""
    fields = [field for field in dataclasses.fields(Config) if field.name != "strategy"]
    given = {f.name: getattr(config, f.name) for f in fields if not _is_default(getattr(config, f.name), f.default)}
    if (candidate.strategy, candidate.zero) != (config.strategy, config.zero):
        given = {name: value for name, value in given.items() if name not in _AXES_OF_A_STRATEGY}
        given |= {"zero": candidate.zero} if candidate.zero is not None else {}
    if candidate.state_axes and candidate.state_axes != config.state_axes:  # over replicas, too
        given["state_axes"] = (*config.data_axes, *config.replica_axes)
    return given


def _is_default(value: object, default: object) -> bool:
    return value is default or (isinstance(value, int | str | tuple) and value == default)


def _reshaped(mesh: AnyMesh, sizes: Mapping[str, int], kind: AxisType) -> AnyMesh:
    shape, names, types = tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names, axis_types=types, abstract_device=mesh.abstract_device)
    assert isinstance(mesh, Mesh)
    return jax.make_mesh(shape, names, devices=list(mesh.devices.flat), axis_types=types)
