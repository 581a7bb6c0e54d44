"""Every gradient transformation in optax's namespace, ready to train; and a tree and a loss to train on.

`cases()` is the list. It includes new callables of optax automatically: `ARGUMENTS` has values for required arguments
by name, and if that is not enough, the error of `Case.make` names the table to extend.
"""

import dataclasses
import functools
import inspect
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax
from jax.sharding import PartitionSpec as P

# The tree and the loss.

SPECS = [(r"embed$", P("tensor")), (r"blocks/up$", P(None, None, "tensor")), (r"list/1$", P("tensor"))]
CUT = {"embed": {0: "tensor"}, "blocks/up": {2: "tensor"}, "list/1": {0: "tensor"}}  # the dims that SPECS shard
HYBRID_SPECS = [
    (r"embed$", P("tensor", "pipeline")),
    (r"blocks/up$", P(None, "pipeline", "tensor")),
    (r"list/1$", P("tensor")),
    (r"odd$", P("pipeline")),
]
HYBRID_CUT = {
    "embed": {0: "tensor", 1: "pipeline"},
    "blocks/up": {1: "pipeline", 2: "tensor"},
    "list/1": {0: "tensor"},
    "odd": {0: "pipeline"},
}
ROWS = 32


def params(dtype: Any) -> Any:
    """Indivisible dims, primes, a scalar, stacked layers, a list, a leaf of size 0; the rest NumPy."""
    rng = np.random.default_rng(11)
    shapes = {
        "embed": (24, 16),
        "blocks": {"up": (3, 16, 32)},
        "list": [(17, 5), (16,)],
        "odd": (16, 17),
        "scalar": (),
        "empty": (0, 3),
    }
    return jax.tree.map(
        lambda s: np.asarray(0.5 * rng.normal(size=s), dtype), shapes, is_leaf=lambda x: type(x) is tuple
    )


def batches(count: int, dtype: Any, rows: int = ROWS) -> list[Any]:
    """Distinct rows, so that no two devices or steps see the same data."""
    rng = np.random.default_rng(12)
    return [{"x": np.asarray(rng.normal(size=(rows, 2)), dtype)} for _ in range(count)]


def loss(params: Any, batch: Any) -> jax.Array:
    """Convex; each element's gradient depends on all rows, on its value and, by each row's sum, on all elements."""
    return _loss(params, batch, {})


def tensor_loss(params: Any, batch: Any) -> jax.Array:
    """The same for params sharded by `SPECS`."""
    return _loss(params, batch, CUT)


def hybrid_loss(params: Any, batch: Any) -> jax.Array:
    """The same for params sharded by `HYBRID_SPECS`."""
    return _loss(params, batch, HYBRID_CUT)


Cut = dict[int, str]


def _loss(params: Any, batch: Any, cuts: dict[str, Cut]) -> jax.Array:
    """Concatenates leaves with the same sharding: one operation compiles faster than one per leaf."""
    vectors: dict[tuple[str, ...], list[Any]] = {}
    for path, leaf in by_path(getattr(params, "fast", params)).items():
        cut = cuts.get(path, {})
        phases = batch["phases"][path] if "phases" in batch else _phases(path, leaf, cut)
        vectors.setdefault(tuple(sorted(cut.values())), []).append((leaf.ravel(), phases.ravel()))
    each_row = jnp.zeros((), batch["x"].dtype)
    for axes, some in vectors.items():
        part = _rough_distance(some, batch["x"])
        each_row = each_row + (lax.psum(part, axes) if axes else part)
    return jnp.mean(jnp.square(each_row))


def by_path(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf for path, leaf in found}


def _phases(path: str, leaf: Any, cut: Cut) -> Any:
    """An irregular number for each element; for a leaf that is sharded in two at some dims, this device's numbers."""
    shape = tuple(n * (2 if d in cut else 1) for d, n in enumerate(leaf.shape))
    phases = np.random.default_rng(zlib.crc32(path.encode())).uniform(0, 6, shape).astype(leaf.dtype)
    for dim, axis in cut.items():
        phases = lax.dynamic_slice_in_dim(phases, lax.axis_index(axis) * leaf.shape[dim], leaf.shape[dim], dim)
    return phases


def reordered(params: Any, batches: list[Any], rows: Any, seed: int | None) -> tuple[Any, list[Any]]:
    """The same task with its rows in the order `rows` and, with a seed, each dim of each leaf shuffled, too."""

    def shuffled(path: str, x: Any) -> Any:
        rng = np.random.default_rng(zlib.crc32(path.encode()) + (seed or 0))
        for dim, n in enumerate(x.shape if seed is not None else ()):
            x = np.take(x, rng.permutation(n), dim)
        return x

    leaves = by_path(params)
    phases = {path: shuffled(path, _phases(path, leaf, {})) for path, leaf in leaves.items()}
    params = jax.tree.unflatten(jax.tree.structure(params), [shuffled(path, leaf) for path, leaf in leaves.items()])
    return params, [{"x": batch["x"][rows], "phases": phases} for batch in batches]


def _rough_distance(vectors: list[Any], x: jax.Array) -> jax.Array:
    """(rows,): roughly |w - target| for each row's targets."""
    elements, phases = (jnp.concatenate(parts) for parts in zip(*vectors, strict=True))
    target = 0.6 * x[:, :1] * jnp.sin(phases) + (0.4 * x[:, 1:] + 0.3) * jnp.cos(1.3 * phases)
    away = elements - target
    return 0.01 * jnp.sum(away * away / (1 + jnp.sqrt(1 + away * away)), 1)


# The cases.

Extra = Callable[[Callable[[Any, Any], Any], Any, Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One transformation.

    `make()` makes a new one, ready to train. `update` needs `value=` (the loss), `grad=` (the gradients) and the result
    of `extra(loss, params, batch)`. `place(params)` converts the params, which only lookahead needs. `without`: leaves
    of `params` on which unsharded optax itself fails -> its error.
    """

    name: str
    make: Callable[[], optax.GradientTransformation]
    extra: Extra = lambda loss, params, batch: {}
    place: Callable[[Any], Any] = lambda params: params
    without: Mapping[str, tuple[type[Exception], str]] = dataclasses.field(default_factory=dict)

    def tree(self, params: Any) -> Any:
        """The params to train: all leaves except `without`."""
        return self.place({name: leaf for name, leaf in params.items() if name not in self.without})


RATE = 0.02

# Values for required arguments, by name.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "learning_rate": lambda: RATE,
    "inner": lambda: optax.adam(RATE),
    "optimizer": lambda: optax.adam(RATE),
    "base_optimizer": lambda: optax.adam(RATE),
    "tx": lambda: optax.adam(RATE),
    "fast_optimizer": lambda: optax.adam(RATE),
    "adv_optimizer": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "transforms": lambda: {"one": optax.adam(RATE), "two": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))},
    "param_labels": lambda: labels,
    "mask": lambda: matrices,
    "freeze_mask": lambda: {name: name in ("embed", "list") for name in params(np.float32)},
    "should_transform_fn": lambda: lambda step: step % 2 == 0,
    "step_size": lambda: -RATE,
    "step_size_fn": lambda: schedule(-1, 4),
    "max_consecutive_errors": lambda: 2,
    "sync_period": lambda: 2,
    "slow_step_size": lambda: 0.5,
    "clipping": lambda: 0.05,
    "max_norm": lambda: 0.1,
    "max_delta": lambda: 0.01,
    "threshold": lambda: 0.01,
    "eta": lambda: 0.01,
    "gamma": lambda: 0.55,
    "key": lambda: jax.random.key(3),
    "seed": lambda: 3,
    "decay": lambda: 0.9,
    "l2_norm_clip": lambda: 0.5,
    "noise_multiplier": lambda: 0.1,
    "measure_name": lambda: "norm",
    "measure": lambda: optax.tree.norm,
    "measures": lambda: {"norm": optax.tree.norm, "ema": optax.measure_with_ema(optax.tree.norm, 0.9)},
    "max_backtracking_steps": lambda: 8,
    "max_linesearch_steps": lambda: 8,
}

# Further arguments, so that the transformation has an effect within five small steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"learning_rate": RATE, "min_dim_size_to_factor": 8, "momentum": 0.9, "weight_decay_rate": 0.01},
    "adadelta": {"learning_rate": 1.0, "weight_decay": 0.01},
    "adagrad": {"learning_rate": 0.1},
    "add_decayed_weights": {"weight_decay": 0.1},
    "apply_every": {"k": 2},
    "contrib.acprop": {"eps": 1e-3},  # divides by this if two gradients are nearly equal
    "contrib.scale_by_acprop": {"eps": 1e-3},
    "contrib.dadapt_adamw": {"estim_lr0": 1e-3, "weight_decay": 0.1},
    "contrib.galore": {"rank": 3, "update_proj_gap": 2},
    "contrib.mechanize": {"s_init": 1e-2},
    "contrib.prodigy": {"estim_lr0": 1e-3, "weight_decay": 0.1},
    "contrib.reduce_on_plateau": {"factor": 0.5, "patience": 1, "rtol": 0.5, "cooldown": 1},
    "contrib.dog": {"init_step": ("learning_rate", 0.01)},
    "contrib.scale_by_galore": {"rank": 3, "update_proj_gap": 2, "base_optimizer": optax.scale_by_adam()},
    "scale_by_distance_over_gradients": {"reps_rel": 0.1},
    "contrib.scale_by_muon": {"weight_dimension_numbers": lambda params: muon_dims(params)},
    "contrib.sophia": {"update_interval": 2, "gamma": 1.0},
    "lars": {"learning_rate": 0.5, "weight_decay": 0.01},
    "lbfgs": {"memory_size": 3},
    "rmsprop": {"centered": True, "momentum": 0.9},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 8},
    "scale_by_lbfgs": {"memory_size": 3},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "sm3": {"learning_rate": 0.1},
}


def schedule(sign: int, times: int) -> Any:
    """From times / 512 to times / 128, exact in float32, in which optax computes schedules for any params.

    Otherwise their last bit, which depends on the program around them, would hide errors below 1e-8.
    """
    return optax.linear_schedule(sign * times / 512, sign * times / 128, 4)


def matrices(params: Any) -> Any:
    """A mask of the leaves with at least two dims."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def muon_dims(params: Any) -> Any:
    """The matrix dims of each leaf; None if it is not a matrix or was masked."""

    def dims(x: Any) -> Any:
        return {2: optax.contrib.MuonDimensionNumbers(), 3: optax.contrib.MuonDimensionNumbers(1, 2)}.get(x.ndim)

    return jax.tree.map(dims, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "one" if x.ndim == 2 else "two", params)


# How to make an optimizer from a callable that is not one: by default `chain(it, scale(-RATE))`.
SCALES = {
    "scale": 1,
    "scale_by_schedule": 1,
    "scale_by_learning_rate": 1,
    "scale_by_rprop": -1,
    "contrib.scale_by_madgrad": 1,
}
LAST = {"keep_params_nonnegative", "scale_by_backtracking_linesearch", "scale_by_polyak", "scale_by_zoom_linesearch"}
WHOLE = {"learning_rate", "inner", "optimizer", "base_optimizer", "tx", "fast_optimizer", "transforms"}

# Callables without an informative annotation that do not make gradient transformations.
OTHERS = {
    "bias_correction",
    "contrib.schedule_free_eval_params",
    "matrix_inverse_pth_root",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}
# Classes with an `update`: the contract, those in `VARIANTS`, and a stateful schedule.
CLASSES = {"GradientTransformation", "GradientTransformationExtraArgs", "MultiSteps", "WrappedSchedule"}


def _value_fn(loss: Any, params: Any, batch: Any) -> dict[str, Any]:
    return {"value_fn": lambda params: loss(params, batch)}


def _obj_fn(loss: Any, params: Any, batch: Any) -> dict[str, Any]:
    return {"obj_fn": lambda params: loss(params, batch)}


def _grad_fn(loss: Any, params: Any, batch: Any) -> dict[str, Any]:
    return {"grad_fn": lambda params, step: jax.grad(loss)(params, batch)}


def _each_example(loss: Any, params: Any, batch: Any) -> dict[str, Any]:
    """(rows, *shape): the gradients of each row."""

    def one(x: Any) -> Any:
        return jax.grad(loss)(params, batch | {"x": x[None]})

    return {"each_example": jax.vmap(one)(batch["x"])}


EXTRA: dict[str, Extra] = {
    "lbfgs": _value_fn,
    "scale_by_backtracking_linesearch": _value_fn,
    "scale_by_zoom_linesearch": _value_fn,
    "contrib.hutchinson_estimator_diag_hessian": _obj_fn,
    "contrib.sophia": _obj_fn,
    "contrib.differentially_private_aggregate": _each_example,
    "contrib.dpsgd": _each_example,
}


def of_each_example(tx: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation of per-example gradients, passed as an extra argument, since a step has only averages."""

    def update(updates: Any, state: Any, params: Any = None, *, each_example: Any, **extra: Any) -> Any:
        del updates, extra
        return tx.update(each_example, state, params)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def settled(tx: Any) -> optax.GradientTransformation:
    """Gives monitor's state its final structure at once, since a change at the first update causes a recompilation.

    test_optimizer.py tests it unchanged.
    """

    def init(params: Any) -> Any:
        return tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[1]

    return optax.GradientTransformation(init, tx.update)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "contrib.differentially_private_aggregate": of_each_example,
    "contrib.dpsgd": of_each_example,
    "contrib.scale_by_muon": lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda x: x.ndim == 2, params)),
    "measure_with_ema": lambda tx: settled(optax.monitor({"ema": tx})),
    "monitor": settled,
}
PLACE = {"lookahead": optax.LookaheadParams.init_synced}


def _modules() -> dict[str, Any]:
    return {"": optax, "contrib.": optax.contrib, "transforms.": optax.transforms}


def public() -> dict[str, Any]:
    """Every distinct public callable of optax."""
    found: dict[str, Any] = {}
    for prefix, module in _modules().items():
        for name in dir(module):
            value = getattr(module, name)
            new = not any(value is other for other in found.values())
            if new and not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value)):
                found[prefix + name] = value
    return found


def factories() -> dict[str, Any]:
    """Callables that make gradient transformations by annotation, or have no annotation and are not in `OTHERS`."""
    found = {name: value for name, value in public().items() if inspect.isroutine(value)}
    returns = {name: inspect.signature(value).return_annotation for name, value in found.items()}
    unknown = {name for name in found if returns[name] is inspect.Signature.empty} - OTHERS
    return {name: found[name] for name in found if name in unknown or "GradientTransformation" in str(returns[name])}


def arguments(name: str, factory: Any) -> dict[str, Any]:
    """The arguments of a factory; raises LookupError for an unknown required argument."""
    needed = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.default is not parameter.empty and parameter.name != "key":
            continue
        if parameter.name not in ARGUMENTS or parameter.kind == parameter.VAR_POSITIONAL:
            raise LookupError(f"optax.{name}: add its argument {parameter.name!r} to ARGUMENTS in tests/matrix.py")
        needed[parameter.name] = ARGUMENTS[parameter.name]()
    return needed | OPTIONS.get(name, {})


def build(name: str) -> Any:
    """The transformation of a factory, as an optimizer."""
    factory = public()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated callables are still public
        made = factory(**arguments(name, factory))
    if name in ADAPTERS:
        made = ADAPTERS[name](made)
    if name in LAST:
        return optax.chain(optax.scale(-1.0), made)
    bare = "scale_by_" in name or not WHOLE & set(inspect.signature(factory).parameters)
    return optax.chain(made, optax.scale(SCALES.get(name, -RATE))) if bare else made


# By hand: transformations with unusual arguments, and common chains.

Sequence = Callable[[], optax.GradientTransformation]


def _multi_steps(inner: Sequence, **options: Any) -> Sequence:
    return lambda: optax.MultiSteps(inner(), 2, **options).gradient_transformation()


def _adamw() -> optax.GradientTransformation:
    return optax.adamw(RATE, weight_decay=0.1)


def _skip(limit: float) -> Any:
    return functools.partial(optax.skip_large_updates, max_squared_norm=limit)


def _by_part(tx: Any) -> Any:
    inner = {"matrices": tx(RATE), "rest": optax.sgd(0.1, momentum=0.9)}
    return optax.partition(inner, lambda params: jax.tree.map(lambda x: "matrices" if x.ndim >= 2 else "rest", params))


def _deprecated_inject() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return optax.inject_stateful_hyperparams(optax.adamw)(schedule(1, 4), weight_decay=0.1)


def _poisoned(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Makes one element NaN in the second step, so that only one device sees it."""

    def update(updates: Any, step: Any, params: Any = None) -> Any:
        bad = updates["odd"].at[13, 2].set(jnp.where(step == 1, jnp.nan, updates["odd"][13, 2]))
        return updates | {"odd": bad}, step + 1

    return optax.chain(optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update), tx)


VARIANTS: dict[str, Sequence] = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), _adamw()),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.05)), ("lamb", optax.lamb(RATE))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(schedule(1, 4), weight_decay=0.1),
    "inject_stateful_hyperparams": _deprecated_inject,
    "stateless": lambda: optax.chain(
        optax.stateless(lambda g, p: jax.tree.map(lambda a, b: a + 0.1 * jnp.mean(b**2), g, p)), optax.sgd(RATE)
    ),
    "stateless_with_tree_map": lambda: optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p), optax.sgd(RATE)
    ),
    "inject_hyperparams of clip": lambda: optax.chain(
        optax.inject_hyperparams(optax.clip_by_global_norm)(schedule(1, 64)), optax.sgd(0.1)
    ),
    "MultiSteps of adamw": _multi_steps(_adamw),
    "MultiSteps, sums": _multi_steps(_adamw, use_grad_mean=False),
    "MultiSteps of MultiSteps": _multi_steps(_multi_steps(_adamw)),
    "MultiSteps in a chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), _multi_steps(_adamw)()),
    "MultiSteps, skip_not_finite": _multi_steps(_adamw, should_skip_update_fn=optax.skip_not_finite),
    "MultiSteps, skip_large_updates": _multi_steps(_adamw, should_skip_update_fn=_skip(3.0)),
    "MultiSteps, skip_not_finite, a nan": lambda: _poisoned(
        _multi_steps(_adamw, should_skip_update_fn=optax.skip_not_finite)()
    ),
    "apply_if_finite, a nan": lambda: _poisoned(optax.apply_if_finite(optax.adam(RATE), 2)),
    "apply_if_finite of MultiSteps": lambda: optax.apply_if_finite(_multi_steps(_adamw)(), 2),
    "zero_nans, a nan": lambda: _poisoned(optax.chain(optax.zero_nans(), optax.adam(RATE))),
    "partition of muon": lambda: _by_part(optax.contrib.muon),
    "partition of lamb": lambda: _by_part(optax.lamb),
    "masked weight decay": lambda: optax.adamw(RATE, weight_decay=0.1, mask=matrices),
    "masked clip": lambda: optax.chain(optax.masked(optax.clip_by_global_norm(0.1), matrices), optax.sgd(0.1)),
    "clip, decay, schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, matrices),
        optax.scale_by_schedule(schedule(-1, 4)),
    ),
    "schedule_free of clip and adamw": lambda: optax.contrib.schedule_free(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE, b1=0.0)), RATE
    ),
    "lookahead of lamb": lambda: optax.lookahead(optax.lamb(RATE), 2, 0.5, reset_state=True),
    "sam, opaque": lambda: _sam(opaque_mode=True),
    "muon, stacked": lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=muon_dims),
    "adafactor, unfactored": lambda: optax.adafactor(RATE, factored=False),
    "adam, bfloat16 moments": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "ema of updates": lambda: optax.chain(optax.sgd(RATE), optax.ema(0.9)),
    "adamw, reduce_on_plateau": lambda: optax.chain(
        _adamw(), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    ),
    "flatten of adamw": lambda: optax.flatten(_adamw()),
    "lbfgs, backtracking": lambda: optax.lbfgs(
        memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(8, store_grad=True)
    ),
    "lbfgs, no linesearch": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
}


def _sam(**options: Any) -> Any:
    return optax.contrib.sam(ARGUMENTS["optimizer"](), ARGUMENTS["adv_optimizer"](), **options)


WITHOUT_VALUE = {"contrib.sam", "sam, opaque"}


def plain(case: Case) -> optax.GradientTransformationExtraArgs:
    """Plain optax, as called by a user with gradients of all params, `value` and `grad`.

    sam gets only its own extra arguments, and lookahead the gradients of the fast params alone.
    """
    tx = case.make()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if case.name in WITHOUT_VALUE:
            extra = {name: x for name, x in extra.items() if name not in ("value", "grad")}
        return optax.with_extra_args_support(tx).update(getattr(updates, "fast", updates), state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


# Transformations that depend on an element's index: noise, random signs, a planted NaN, the signs of singular vectors.
BY_PLACE = {
    "MultiSteps, skip_not_finite, a nan",
    "add_noise",
    "apply_if_finite, a nan",
    "contrib.differentially_private_aggregate",
    "contrib.dpsgd",
    "contrib.galore",
    "contrib.hutchinson_estimator_diag_hessian",
    "contrib.scale_by_galore",
    "contrib.sophia",
    "noisy_sgd",
    "zero_nans, a nan",
}
EXTRA |= {"sam, opaque": _grad_fn, "lbfgs, backtracking": _value_fn}
PLACE |= {"lookahead of lamb": PLACE["lookahead"]}

# Leaves on which optax itself fails, and its error.
_MUON = {"empty": (ZeroDivisionError, "division by zero")}
_SM3 = {
    "scalar": (IndexError, "list index out of range"),
    "empty": (ValueError, "zero-size array to reduction operation max"),
}
_DISTANCE = {"scalar": (TypeError, "carry")}  # its update of a scalar has shape (1,), and then the params too
WITHOUT: dict[str, Mapping[str, tuple[type[Exception], str]]] = {
    "contrib.muon": _MUON,
    "muon, stacked": _MUON,
    "partition of muon": _MUON,
    "scale_by_distance_over_gradients": _DISTANCE,
    "scale_by_sm3": _SM3,
    "sm3": _SM3,
}


def cases() -> dict[str, Case]:
    """All cases by name."""
    makes = {name: functools.partial(build, name) for name in factories()} | VARIANTS
    found = {}
    for name, make in makes.items():
        special = {"extra": EXTRA[name]} if name in EXTRA else {}
        special |= {"place": PLACE[name]} if name in PLACE else {}
        found[name] = Case(name, make, without=WITHOUT.get(name, {}), **special)
    return found
