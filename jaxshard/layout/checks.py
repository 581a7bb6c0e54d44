"""Every check of a strategy's options that needs no params."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxshard.base.loss_scale import LossScale
from jaxshard.base.types import REPLICA_AXIS, AnyMesh, DType, axes_of, is_part, is_whole
from jaxshard.layout import host_memory
from jaxshard.layout.options import AXES_OPTIONS, Config, Options
from jaxshard.system.text import nearest
from jaxshard.system.users_lines import warn


def checked_config(strategy: str, inner: object, mesh: object, options: dict[str, Any]) -> Config:
    """The config of a strategy, after every check that needs no params.

    Raises:
      TypeError: `inner` is not a gradient transformation, `mesh` is not a mesh, or an option is unknown.
      ValueError: the mesh lacks an axis, or an option has an invalid value.
    """
    check_inner(strategy, inner)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{strategy}: needs a jax.sharding.Mesh, got {type(mesh).__name__}; see jaxshard.make_mesh")
    _check_names(strategy, options)
    options = dict(options)
    for name in options.keys() & AXES_OPTIONS:
        options[name] = _axis_names(strategy, name, options[name])
    for name, dtype in (("bfloat16", jnp.bfloat16), ("int8", jnp.int8)):
        if options.get("moment_dtype") == name:
            options["moment_dtype"] = dtype
    if isinstance(options.get("frozen"), str):
        options["frozen"] = (options["frozen"],)
    if "state_memory" in options:
        options["state_memory"] = host_memory.checked(strategy, options["state_memory"], mesh)
    config = Config(strategy, **options)
    _check_zero(config)
    _check_data_axes(mesh, config)
    _check_nested(mesh, config)
    _check_model_axes(mesh, config)
    _check_mesh_types(mesh, config)
    _check_numbers(config)
    return config


def check_inner(who: str, inner: object) -> None:
    """Raises a TypeError unless `inner` is an optax optimizer."""
    if not (issubclass(type(inner), tuple) and hasattr(inner, "init") and hasattr(inner, "update")):
        cure = "; give its .gradient_transformation()" if hasattr(inner, "gradient_transformation") else ""
        cure = f"; call it: {inner.__name__}(...)" if isinstance(inner, FunctionType) else cure
        raise TypeError(
            f"{who}: needs an optax.GradientTransformation, got {type(inner).__name__}: {inner!r:.80}{cure}"
        )


def check_flag(who: str, name: str, value: object) -> None:
    """Raises a TypeError unless `value` is True or False; the string "False" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{who}: {name}={value!r:.80} is a {type(value).__name__}; give True or False")


def _axis_names(strategy: str, name: str, axes: object) -> tuple[str, ...]:
    names = cast("Sequence[object]", axes if isinstance(axes, list | tuple) else (axes,))
    found = tuple(axis for axis in names if isinstance(axis, str))
    if len(found) < len(names):
        raise TypeError(f"{strategy}: {name}={axes!r:.80} must be a mesh axis's name, or a tuple of such names")
    return found


def _check_names(strategy: str, options: dict[str, Any]) -> None:
    own = {"zero"} if strategy == "hybrid" else set[str]()
    known = sorted(Options.__annotations__.keys() | own)
    for name in options:
        if name not in known:
            hint = f"; {_ELSEWHERE[name]}." if name in _ELSEWHERE else nearest(name, known)
            raise TypeError(f"{strategy}: unknown option {name!r}{hint or '.'} The options are {', '.join(known)}")


_ON_HOST = 'give state_memory="host"'
_OF_STEP = "give microbatches= to jaxshard.train_step"
_IN_PRECISION = "cast in the loss, or give master_dtype= (docs/precision.md)"
_RECOMPUTED = "put jax.checkpoint around a layer in the loss"
_ELSEWHERE = {  # options of DeepSpeed, FSDP and their kin
    **dict.fromkeys(("cpu_offload", "offload", "offload_policy", "offload_optimizer", "offload_state"), _ON_HOST),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps", "microbatches"), _OF_STEP),
    **dict.fromkeys(("mixed_precision", "mp_policy", "bf16", "fp16", "dtype", "param_dtype"), _IN_PRECISION),
    "activation_checkpointing": _RECOMPUTED,
    "remat": _RECOMPUTED,
    **dict.fromkeys(("axis", "axes", "axis_name", "mesh_axis", "shard_axis"), "give data_axes="),
    **dict.fromkeys(("gradient_clipping", "max_grad_norm", "clip_grad"), "put optax.clip_by_global_norm in the chain"),
    "reshard_after_forward": 'jax.checkpoint around a layer, or regather="backward", gathers params again',
    "stage": "write jaxshard.zero1, zero2 or zero3",
    "sharding_strategy": "write jaxshard.zero2, zero3 or hsdp",
    "donate": "give it to jaxshard.train_step",
    "has_aux": "give it to jaxshard.train_step",
}


def _check_zero(config: Config) -> None:
    if config.strategy == "hybrid" and not (is_whole(config.zero, 0) and config.zero in (0, 1, 2, 3)):
        raise ValueError(f"hybrid: zero={config.zero!r} is not a ZeRO level; give 0 (ddp), 1, 2 or 3")


def _check_data_axes(mesh: AnyMesh, config: Config) -> None:
    given = config.strategy == "hsdp" or config.replica_axes != (REPLICA_AXIS,)
    for axis in (*config.data_axes, *(config.replica_axes if given else ())):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{config.strategy}: needs the mesh axis {axis!r}; the mesh has {tuple(mesh.axis_names)}. "
                "Make one with jaxshard.make_mesh, or name yours with data_axes= and replica_axes="
            )
    both = (*config.replica_axes, *config.data_axes)
    if not config.data_axes or len(set(both)) < len(both):
        raise ValueError(
            f"{config.strategy}: data_axes {config.data_axes} and replica_axes {config.replica_axes} must name at "
            "least one data axis, and each axis only once: nothing is sharded over a replica axis"
        )
    if config.strategy == "hsdp" and not config.replica_axes:
        raise ValueError("hsdp: replica_axes () is empty; name a replica axis, or use zero3")


def _check_nested(mesh: AnyMesh, config: Config) -> None:
    """Raises a ValueError unless params' axes are among gradients', these among state's, and all split the batch."""
    known = tuple(axis for axis in (*config.replica_axes, *config.data_axes) if axis in mesh.axis_names)
    for name in ("params_axes", "grads_axes", "state_axes"):
        for axis in getattr(config, name) or ():
            if axis not in known:
                raise ValueError(
                    f"{config.strategy}: {name} {getattr(config, name)} names {axis!r}, over which the batch is not "
                    f"split; the batch axes are {known}. Name it in data_axes= or replica_axes=, too, or leave it out"
                )
    names, wanted = ("params_axes", "grads_axes", "state_axes"), config.asked_axes
    for inner, outer, few, many in zip(names, names[1:], wanted, wanted[1:], strict=False):
        if missing := [axis for axis in few if axis not in many]:
            raise ValueError(
                f"{config.strategy}: {inner} {few} must be among {outer} {many}, which lack {missing}: give "
                f"{outer}={(*few, *(axis for axis in many if axis not in few))}, or {inner}="
                f"{tuple(axis for axis in few if axis in many)}"
            )


def _check_model_axes(mesh: AnyMesh, config: Config) -> None:
    for axis in config.auto_axes:
        if axis not in mesh.axis_names or axis in (*config.data_axes, *config.replica_axes):
            raise ValueError(
                f"{config.strategy}: auto_axes {config.auto_axes} must be axes of the mesh {tuple(mesh.axis_names)} "
                "that the model is sharded over, such as 'tensor'"
            )
    if config.auto_axes and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"{config.strategy}: auto_axes needs a mesh of Auto axes; jaxshard.make_mesh makes one (jax.make_mesh with "
            "axis_types=)"
        )
    if config.strategy in ("tensor_parallel", "pipeline_parallel") and not axes_of(config.specs):
        raise ValueError(
            f"{config.strategy}: the specs {config.specs!r:.80} name no axis, so nothing would be sharded; give a "
            "PartitionSpec for each sharded leaf, or rules [(regex, PartitionSpec), ...]"
        )


def _has_blocks(mesh: AnyMesh) -> bool:
    """Whether parts of the mesh's axes can cut arrays: under Explicit axes, types name the axes of one mesh alone."""
    return AxisType.Explicit not in mesh.axis_types and not any(map(is_part, mesh.axis_names))


def _check_mesh_types(mesh: AnyMesh, config: Config) -> None:
    if AxisType.Manual in mesh.axis_types:
        manual = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
        raise ValueError(
            f"{config.strategy}: the mesh's axes {manual} are Manual, as inside a shard_map; give the original mesh, "
            "with Auto or Explicit axes (jaxshard.make_mesh)"
        )
    if config.uneven == "blocks" and not _has_blocks(mesh):
        raise ValueError(
            f'{config.strategy}: uneven="blocks" needs a mesh of Auto axes (jaxshard.make_mesh makes one), whose '
            f"names are no parts of axes; this mesh has {mesh}"
        )
    kinds = {str(kind) for kind in mesh.axis_types}
    if len(kinds) > 1:
        raise ValueError(
            f"{config.strategy}: the mesh mixes axis types {sorted(kinds)}; make all Auto, or all Explicit"
        )


def _check_numbers(config: Config) -> None:
    check_flag(config.strategy, "stochastic_rounding", config.stochastic_rounding)
    if config.rows not in ("apart", "mixed"):
        raise ValueError(
            f'{config.strategy}: rows={config.rows!r:.80} is unknown; give "mixed" for a loss that is meant to mix '
            'the rows of a device, or leave it out ("apart")'
        )
    if config.rows == "mixed":
        text = 'rows="mixed" is deprecated: pass train_step (or value_and_grad, evaluate, predict) loss_view="local"'
        warn(f"{config.strategy}: {text}", DeprecationWarning)
    if config.regather not in ("use", "step", "backward"):
        found = f"regather={config.regather!r:.80}"
        raise ValueError(f'{config.strategy}: {found} is unknown; give "use", "backward" or "step"')
    if config.regather != "use" and not config.cuts.params:
        found = f'regather="{config.regather}"'
        raise ValueError(f"{config.strategy}: {found} is for sharded params (zero3, hsdp); leave it out")
    if config.uneven not in ("whole", "blocks"):
        found = f"uneven={config.uneven!r:.80}"
        raise ValueError(f'{config.strategy}: {found} is unknown; give "blocks" or "whole"')
    if not is_whole(config.min_shard_size, 0):
        raise ValueError(f"{config.strategy}: min_shard_size {config.min_shard_size!r} must be an integer, 0 or more")
    for name, dtype in (("reduce_dtype", config.reduce_dtype), ("master_dtype", config.master_dtype)):
        if dtype is not None and not _is_floating(dtype):
            raise ValueError(
                f"{config.strategy}: {name} {dtype!r} must be a floating dtype of 16 bits or more, such as jnp.float32"
            )
    if config.moment_dtype is not None and config.moment_dtype not in (jnp.bfloat16, jnp.int8):
        raise ValueError(
            f"{config.strategy}: moment_dtype {config.moment_dtype!r} must be jnp.bfloat16, which has the range that "
            'second moments need, or "int8", for codes that have it; or leave it out'
        )
    if config.stochastic_rounding and config.master_dtype is not None:
        raise ValueError(
            f"{config.strategy}: stochastic_rounding is for params without masters; leave out either it or master_dtype"
        )
    if not _is_loss_scale(config.loss_scale):
        raise TypeError(
            f"{config.strategy}: loss_scale must be a jaxshard.LossScale, got {type(config.loss_scale).__name__}"
        )


def _is_loss_scale(value: object) -> bool:
    return value is None or isinstance(value, LossScale)


def _is_floating(dtype: DType) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False
