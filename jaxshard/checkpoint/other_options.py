"""Converts a checkpoint to a strategy with different options.

It knows only the options that put `extra` beside an optimizer's own state: masters, moments in bf16 or in 8 bits,
stochastic rounding and loss scaling. The optimizer must be the same.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.base.loss_scale import LossScale
from jaxshard.checkpoint.storage.leaves import NUMBERS, FlatTree, Index, Leaf
from jaxshard.optimizer import eight_bits

_EXTRA = re.compile(r"((?:.*/)?)extra/(?:(?:master|scale|loss_scale)/.*|rounding)")
_CODES = ("int8", "uint8")

Found: TypeAlias = Mapping[str, Leaf]


class Plan(NamedTuple):
    """How to make a template's leaves from a checkpoint's.

    Attributes:
      sources: path in the checkpoint -> a leaf with the shape and sharding to read it to.
      made: path in the template -> the function of all leaves read that makes it.
      changes: a sentence for each option that differs.
    """

    sources: dict[str, Leaf]
    made: dict[str, Callable[[Found], Leaf]]
    changes: list[str]


def plan(template: FlatTree, index: Index) -> Plan | None:
    """The plan of a conversion; None: no such option differs, or something else differs too."""
    here, there = _roots(template.leaves), _roots(index)
    if len(here | there) != 1:
        return None
    root = next(iter(here | there))
    return _Planner(template, index, root, bool(here), bool(there)).found()


def _roots(paths: Iterable[str]) -> set[str]:
    return {found[1] for found in map(_EXTRA.fullmatch, paths) if found}


def changed_hyperparams(step: int, template: Mapping[str, Leaf], found: Found) -> list[str]:
    """A line for each hyperparameter of `optax.inject_hyperparams` whose restored value differs from the program's,
    except those that a schedule sets."""
    lines = list[str]()
    for path, x in template.items():
        named = _HYPERPARAM.fullmatch(path)
        scheduled = named and any(other.startswith(f"{named[1]}hyperparams_states/{named[2]}/") for other in template)
        if named is None or scheduled or not isinstance(x, jax.Array | np.ndarray) or x.size != 1:
            continue
        now, then = _scalar(x), _scalar(found[path])
        if now != then:
            lines.append(
                f"{path} is {then:.6g} in checkpoint {step}, and this value is kept; this program has {now:.6g}: set "
                "it in the restored state to use the new value"
            )
    return lines


_HYPERPARAM = re.compile(r"((?:.*/)?)hyperparams/([^/]+)")


def _scalar(x: Leaf) -> float:
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x).astype(np.float32).item()


class _Planner:
    """Makes the plan. `root`: the path of the optimizer's state, such as "state/"."""

    def __init__(self, template: FlatTree, index: Index, root: str, here: bool, there: bool):
        self._wanted, self._index = template, index
        self._extra, self._scale = f"{root}extra/", f"{root}extra/scale/"
        self._inner = f"{root}inner/" if here else root
        self._saved_inner = f"{root}inner/" if there else root
        self._master = f"{root}extra/master/"
        self._plan = Plan({}, {}, [])
        self._params = self._root_of_params()

    def found(self) -> Plan | None:
        """The plan, if it makes each leaf, and uses each saved leaf that belongs to no option."""
        rules = (self._copy_extra, self._add_extra, self._moment, self._param, self._copy)
        for path, x in self._wanted.leaves.items():
            if path not in self._plan.made and not any(rule(path, x) for rule in rules):
                return None
        left = [path for path in self._index if path not in self._plan.sources]
        if any(path.startswith(f"{self._extra}loss_scale/") for path in left):
            self._say("loss_scale: the checkpoint's scale is ignored")
        return self._plan if all(path.startswith(self._extra) or path in self._wanted.leaves for path in left) else None

    # One leaf.

    def _take(self, path: str, source: str, x: Leaf) -> bool:
        """Plans the saved leaf in the template's dtype; False if the shapes differ."""
        entry = self._index.get(source)
        fits = entry is not None and tuple(entry["shape"]) == np.shape(x)
        if fits and self._wanted.keys.get(path) == (entry or {}).get("key"):
            self._plan.sources.setdefault(source, x)
            self._plan.made[path] = lambda found: _laid(found[source], x)
            return True
        return False

    def _copy_extra(self, path: str, x: Leaf) -> bool:
        return path.startswith(self._extra) and not path.startswith(self._scale) and self._take(path, path, x)

    def _add_extra(self, path: str, x: Leaf) -> bool:
        """Plans a leaf that an option adds: masters copy the params, counts start anew."""
        name = path.removeprefix(self._extra)
        if path.startswith(self._master):
            source = f"{self._params}{path.removeprefix(self._master)}"
            self._say("master_dtype: masters are made from the saved params")
            return self._params is not None and self._take(path, source, x)
        start = {"rounding": jnp.uint32(0)} | {f"loss_scale/{key}": y for key, y in LossScale().start().items()}
        if not path.startswith(self._extra) or name not in start:
            return False
        value = x if isinstance(x, jax.Array | np.ndarray) else np.asarray(start[name])
        self._plan.made[path] = lambda _: np.asarray(value)
        if name == "loss_scale/scale":
            self._say(f"loss_scale: it starts at {float(np.asarray(value)):g}")
        return True

    def _moment(self, path: str, x: Leaf) -> bool:
        """Plans a leaf of the optimizer's own state, as floats or codes."""
        if not path.startswith(self._inner) or path.startswith(self._extra):
            return False
        name = path.removeprefix(self._inner)
        source = f"{self._saved_inner}{name}"
        entry, scale = self._index.get(source), f"{self._scale}{name}"
        if entry is None or tuple(entry["shape"]) != np.shape(x):
            return False
        is_coded, was_coded = scale in self._wanted.leaves, scale in self._index
        if str(_dtype(x)) != entry["dtype"] and not (
            _is_float(_dtype(x), is_coded) and _is_float(entry["dtype"], was_coded)
        ):
            return False
        if was_coded:
            self._plan.sources[scale] = jax.ShapeDtypeStruct(tuple(self._index[scale]["shape"]), jnp.float32)
        self._plan.sources[source] = x
        if is_coded and was_coded and str(_dtype(x)) == entry["dtype"]:
            self._plan.made[path] = lambda found: found[source]
            self._plan.made[scale] = lambda found: _laid(found[scale], self._wanted.leaves[scale])
            return True
        wide = _decoded(source, scale if was_coded else None)
        self._plan.made[path] = lambda found: _laid(wide(found), x)
        if is_coded:
            codes, y = _encoded(wide, _dtype(x)), self._wanted.leaves[scale]
            self._plan.made[path] = lambda found: _laid(codes(found)[0], x)
            self._plan.made[scale] = lambda found: _laid(codes(found)[1], y)
        if str(_dtype(x)) != entry["dtype"]:
            self._say(f"moment_dtype: moments saved in {entry['dtype']} are now {_dtype(x)}")
        return True

    def _param(self, path: str, x: Leaf) -> bool:
        """Plans a parameter from its saved master, rounded, where the template has no masters."""
        if self._params is None or not path.startswith(self._params):
            return False
        name = path.removeprefix(self._params)
        if f"{self._master}{name}" in self._wanted.leaves:
            return self._take(path, path, x)
        if f"{self._master}{name}" not in self._index:
            return False
        self._say(f"master_dtype: params are made from the saved masters, as {_dtype(x)}")
        return self._take(path, f"{self._master}{name}", x)

    def _copy(self, path: str, x: Leaf) -> bool:
        entry = self._index.get(path)
        return entry is not None and entry["dtype"] == str(_dtype(x)) and self._take(path, path, x)

    # All leaves.

    def _root_of_params(self) -> str | None:
        """The path of the masters' params, in the template and in the checkpoint: "params/", or the only candidate."""
        every, both = {*self._wanted.leaves, *self._index}, {*self._wanted.leaves} & {*self._index}
        named = {path.removeprefix(self._master) for path in every if path.startswith(self._master)}
        if not named:
            return None
        one = max(named, key=len)
        roots = {path.removesuffix(one) for path in both if path.endswith(f"/{one}") or path == one}
        others = (self._extra, self._inner, self._saved_inner)
        found = [r for r in roots if not r.startswith(others) and all(f"{r}{name}" in both for name in named)]
        return "params/" if "params/" in found else found[0] if len(found) == 1 else None

    def _say(self, words: str) -> None:
        if words not in self._plan.changes:
            self._plan.changes.append(words)


def _dtype(x: Leaf) -> np.dtype:
    return np.dtype(type(x)) if isinstance(x, NUMBERS) else x.dtype


def _is_float(dtype: object, coded: bool) -> bool:
    """Whether such a leaf stands for real numbers: floats, or codes with scales."""
    return str(dtype) in _CODES if coded else jnp.issubdtype(jnp.dtype(str(dtype)), jnp.floating)


def _decoded(source: str, scale: str | None) -> Callable[[Found], Leaf]:
    if scale is None:
        return lambda found: found[source]
    return lambda found: jax.jit(eight_bits.decode)(*_together(found[source], found[scale]))


def _encoded(wide: Callable[[Found], Leaf], dtype: np.dtype) -> Callable[[Found], tuple[Leaf, Leaf]]:
    return lambda found: jax.jit(lambda x: eight_bits.encode(x, dtype))(wide(found))


def _together(codes: Leaf, scales: Leaf) -> tuple[Leaf, Leaf]:
    """Puts both on the devices of the codes."""
    if isinstance(codes, jax.Array) and isinstance(scales, np.ndarray):
        mesh = codes.sharding.mesh if isinstance(codes.sharding, jax.sharding.NamedSharding) else None
        if mesh is not None:
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            return codes, jax.make_array_from_callback(scales.shape, whole, lambda at: scales[at])
    return codes, scales


def _laid(x: Leaf, like: Leaf) -> Leaf:
    """Puts a leaf where the template has it, if that is on devices."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(x, jax.Array) or x.sharding == sharding:
        return x
    if sharding is None or (isinstance(like, jax.Array) and not like.committed) or isinstance(like, np.ndarray):
        return np.asarray(x)
    return jax.device_put(x, sharding)
