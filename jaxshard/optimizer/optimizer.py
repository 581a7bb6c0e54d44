"""`ShardedOptimizer`: an optax optimizer whose state is sharded over a mesh."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxshard.base.tree import check_alive, check_same_structure
from jaxshard.base.types import AnyMesh, Params, T, Tree
from jaxshard.layout.checks import checked_config
from jaxshard.layout.layout import Layout, Shardings, check_arrays, warn_if_one_replica
from jaxshard.layout.options import Config
from jaxshard.mesh import axes_in_words, check_context, check_has_devices, make_mesh
from jaxshard.optimizer import state as states
from jaxshard.optimizer.inner import examples
from jaxshard.optimizer.inner.update import fast
from jaxshard.optimizer.local.local_view import local_update
from jaxshard.optimizer.precision import ShardedState
from jaxshard.optimizer.sharding import Setup
from jaxshard.optimizer.update import advance
from jaxshard.programs import jaxprs


@dataclasses.dataclass(frozen=True)
class _Methods:
    """The two functions of a `ShardedOptimizer`, bound to its setup, so that it can be copied and pickled."""

    setup: Setup

    def init(self, params: Tree) -> optax.OptState:
        return states.init(self.setup, params)

    def update(
        self, updates: Params, state: optax.OptState, params: Params | None = None, **extra: Tree
    ) -> tuple[Params, optax.OptState]:
        setup, whole = self.setup, updates if params is None else params
        check_context("update", setup.mesh)
        updates, params = setup.trained(updates), None if params is None else setup.trained(params)
        setup, updates, extra = _with_examples(setup, updates, state, params, extra)
        if params is not None:
            check_arrays(fast(params))
            check_same_structure("update: the gradients", fast(updates), fast(params), "parameter")
        elif setup.config.widens:
            raise ValueError(
                "update: master weights (master_dtype) and stochastic_rounding need the params: "
                "update(updates, state, params)"
            )
        if setup.config.loss_scale is not None:
            raise ValueError("update: only train_step scales the loss and updates the scale; use that")
        for what, tree in (("the gradients", updates), ("the state", state), ("the params", params)):
            check_alive(f"update: {what}", tree)
        if states.is_local(setup):
            updates, state = local_update(setup, updates, state, params, extra)
        else:
            states.check_state("update", setup, state, updates if params is None else params)
            updates, state, _ = advance(setup, updates, state, params, extra, want="updates")
        return setup.with_frozen(updates, whole, _no_change), state


def _with_examples(
    setup: Setup, grads: Tree, state: Tree, params: Tree | None, extra: dict[str, Tree]
) -> tuple[Setup, Tree, dict[str, Tree]]:
    """(setup, grads, extra), with gradients of each example as a further argument of the inner optimizer.

    Raises:
      ValueError: there are such gradients inside a shard_map over the batch axes.
    """
    if states.is_local(setup):
        if params is not None and examples.are_of_each_example(grads, params):
            raise ValueError(
                f"update: {setup.config.strategy} got the gradients of each example inside a shard_map, where a device "
                "has only its own examples; call update outside shard_map, in jax.jit"
            )
        return setup, grads, extra
    plain = state.inner if isinstance(state, ShardedState) else state
    inner, grads, extra = examples.as_argument(setup.inner, grads, plain, params, extra)
    return setup if inner is setup.inner else dataclasses.replace(setup, inner=inner), grads, extra


def _no_change(frozen: Tree) -> jax.Array:
    """The zero update of a frozen leaf, for `optax.apply_updates`."""
    return jnp.zeros((), frozen.dtype)


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer whose state (and gradients, and params) are sharded over a mesh, with the same result.

    A `GradientTransformationExtraArgs`, usable wherever optax takes one. Make it with `zero2` and its siblings.

    * `init(params)`: the state of `inner`, the same pytree, sharded from the start. NumPy, placed and abstract params
      all work; abstract ones give abstract state with its shardings.
    * `update(updates, state, params=None, **extra)`: takes global arrays under any sharding; the updates are laid out
      as the params are. Inside a `jax.shard_map` over the data axes it takes this device's own gradients instead.
      For `optax.contrib.dpsgd` it takes the gradients of each example, `(examples, *shape)`, under any sharding.
    """

    @property
    def _setup(self) -> Setup:
        """The inner optimizer, mesh and strategy, and what follows from them for given params."""
        return self.init.__self__.setup  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def inner(self) -> optax.GradientTransformation:
        """The optax optimizer inside."""
        return self._setup.inner

    @property
    def mesh(self) -> AnyMesh:
        """A `jax.sharding.Mesh` (or, for plans, an `AbstractMesh`)."""
        return self._setup.mesh

    @property
    def config(self) -> Config:
        """The strategy and its options."""
        return self._setup.config

    @property
    def world_size(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def rank(self) -> int:
        """The index in the mesh of this process's first device; a ValueError if it has none there."""
        devices, here = check_has_devices("rank", self.mesh).devices, jax.process_index()
        found = (i for i, device in enumerate(devices.flat) if device.process_index == here)
        if (first := next(found, None)) is None:
            raise ValueError(f"rank: process {here} has no device in this mesh")
        return first

    def shardings(self, params: Tree) -> Shardings:
        """Where params, grads (as `value_and_grad` returns them) and state live, and their PartitionSpecs.

        Args:
          params: arrays or `ShapeDtypeStruct`s.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit their leaf, or match no leaf.
        """
        return self._setup.shardings(params)

    def layout(self, params: Tree) -> Layout:
        """Where each leaf lives, with the reason and its bytes per device, as a table to print.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        self._setup.strictly(params)
        return self._setup.with_state(params)

    def place(self, params: Params) -> Params:
        """Copies the params to where they live on the mesh; no alias, so a donating step leaves the caller's arrays.

        Abstract params (`ShapeDtypeStruct`s) come back abstract, with their shardings.

        Raises:
          TypeError: a leaf that is not floating.
          ValueError: specs that do not fit, or match nothing.
        """
        return states.place(self._setup, params)

    def synchronize(self, tree: T) -> T:
        """Makes all copies of each replicated array equal, bit for bit, to the copy on the first device that has one.

        Args:
          tree: params, state or any tree of arrays on the mesh.

        Raises:
          ValueError: an array that is not laid out over a mesh.
        """
        return states.synchronize(self._setup, tree)

    if not TYPE_CHECKING:  # it would find every attribute

        def __getattr__(self, name: str) -> object:
            cure = f"; {_IN_TORCH[name]}" if name in _IN_TORCH else ""
            raise AttributeError(f"ShardedOptimizer has no attribute {name!r}{cure}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} cannot be set: an optax optimizer does not change. Make the learning rate a schedule, or part of "
            'the state: optax.inject_hyperparams(optax.adamw)(3e-4), then state.hyperparams["learning_rate"] = ...'
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedOptimizer) and self._setup == other._setup

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._setup)

    def __repr__(self) -> str:
        return described(self._setup)


_STEP = "write step = jaxshard.train_step(loss_fn, opt); params, state, metrics = step(params, state, batch)"
_STATE = "the state is a value, opt.init(params); jaxshard.checkpoint.Checkpointer saves it"
_IN_TORCH = {  # what one looks for who comes from torch
    **dict.fromkeys(("step", "zero_grad", "apply", "apply_gradients"), _STEP),
    **dict.fromkeys(("state", "state_dict", "load_state_dict", "opt_state"), _STATE),
    "param_groups": "optax.partition gives groups of params transforms of their own",
    "add_param_group": "optax.partition gives groups of params transforms of their own",
}


def described(setup: Setup) -> str:
    """The strategy, the optimizer's type, the mesh and the given options: "zero2(..., data 8)"."""
    name = f"{setup.config.strategy}({type(setup.inner).__name__}"
    return ", ".join([name, axes_in_words(setup.mesh), *setup.config.given]) + ")"


def setup_of(opt: object, who: str, beside: object = None) -> Setup:
    """The setup of a `ShardedOptimizer`; `who` names the caller in the error, `beside` is its other argument.

    Raises:
      TypeError: it is another kind of optimizer, or the two arguments are swapped.
    """
    if not isinstance(opt, ShardedOptimizer):
        if isinstance(beside, ShardedOptimizer):
            first = "batch" if who == "shard_batch" else "loss_fn"
            raise TypeError(f"{who}: the arguments are swapped; write {who}({first}, opt)")
        if isinstance(getattr(opt, "tx", None), ShardedOptimizer):
            raise TypeError(
                f"{who} needs a ShardedOptimizer, got {type(opt).__name__} around one: pass its tx, and keep params "
                f"and state outside the {type(opt).__name__}"
            )
        inside = "optax.chain(...)"
        if hasattr(opt, "gradient_transformation"):
            inside = f"optax.{type(opt).__name__}(...).gradient_transformation()"
        raise TypeError(
            f"{who} needs a ShardedOptimizer, got {type(opt).__name__}; put it inside: jaxshard.zero2({inside}, mesh)"
        )
    return opt._setup


def make(strategy: str, inner: optax.GradientTransformation, mesh: AnyMesh | None, **options: Any) -> ShardedOptimizer:
    """The optimizer of a strategy, its options checked; see `jaxshard.strategies`."""
    if isinstance(mesh, tuple) and isinstance(inner, Mesh | AbstractMesh):
        raise TypeError(f"{strategy}: the arguments are swapped; write {strategy}(optimizer, mesh)")
    if isinstance(inner, ShardedOptimizer):
        raise TypeError(f"{strategy}: got {inner!r}, which is already sharded; give its optax optimizer (.inner)")
    mesh = make_mesh() if mesh is None else mesh
    config = checked_config(strategy, inner, mesh, options)
    warn_if_one_replica(config, mesh.shape)
    methods = _Methods(Setup(inner, mesh, config))
    jaxprs.core()  # imported here: JAX traces a program again if this import happens within its first trace
    return ShardedOptimizer(methods.init, methods.update)  # pyright: ignore[reportArgumentType]
