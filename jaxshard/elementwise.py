"""The local view: an update inside a user's `jax.shard_map`; and may this transformation run on a shard?

The answer comes from the traced computation, not from names. Each value is one of
  FILL   the same number in every element, on every device (scalars too);
  WHOLE  an array that every device holds whole;
  a path a shard, of the leaf of that path.
Shards may meet FILL values and shards of the same shape, element by element. Anything else mixes elements that other
devices hold, and is refused.
"""

from typing import Any

from jaxshard.jaxprs import INLINED, REMAT, inner_jaxpr, is_literal, open_jaxpr, scan_split

_FILL, _WHOLE = "", "*"

_POINTWISE_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not or pcast
    population_count pow pvary real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor optimization_barrier
"""
_POINTWISE = frozenset(_POINTWISE_NAMES.split())
_CALLS = INLINED | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


class NotElementwise(Exception):
    """A shard met an operation that mixes elements: `operation` on the leaf of `path`."""

    def __init__(self, operation: str, path: str):
        super().__init__(operation, path)
        self.operation, self.path = operation, path


def check_elementwise(jaxpr: Any, labels: list[str]) -> list[str]:
    """The labels of a jaxpr's outputs, given those of its inputs.

    Raises:
      NotElementwise: the computation is not element-wise in its shards.
    """
    jaxpr = open_jaxpr(jaxpr)
    env: dict[Any, str] = {v: _label(v, _WHOLE) for v in jaxpr.constvars}
    env |= {v: label if _is_shard(label) else _label(v, label) for v, label in zip(jaxpr.invars, labels, strict=True)}

    def read(v: Any) -> str:
        return _label(v, _WHOLE) if is_literal(v) else env[v]

    for eqn in jaxpr.eqns:
        found = [read(v) for v in eqn.invars]
        outs = _through(eqn, found) if any(map(_is_shard, found)) else _without_shards(eqn, found)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def check_same_numbers(on_shards: Any, on_whole: Any) -> None:
    """Compares the program traced on shards with itself traced on whole leaves: no number may come from a shape.

    Raises:
      NotElementwise: a constant, such as a leaf's size, differs.
    """
    one, two = open_jaxpr(on_shards), open_jaxpr(on_whole)
    if [e.primitive.name for e in one.eqns] != [e.primitive.name for e in two.eqns]:
        raise NotElementwise("a computation that depends on shapes", "some leaf")
    for a, b in zip(one.eqns, two.eqns, strict=True):
        for v, w in zip(a.invars, b.invars, strict=True):
            if is_literal(v) and is_literal(w) and v.val != w.val:
                raise NotElementwise(f"{a.primitive.name} with a number taken from the shape", _shape_of(a))
        for key, inner in a.params.items():
            if hasattr(open_jaxpr(inner), "eqns"):
                check_same_numbers(inner, b.params[key])
            elif key == "branches":
                for pair in zip(inner, b.params[key], strict=True):
                    check_same_numbers(*pair)


def _shape_of(eqn: Any) -> str:
    return f"the leaf whose shard has shape {eqn.outvars[0].aval.shape}"


def _is_shard(label: str) -> bool:
    return label not in (_FILL, _WHOLE)


def _label(v: Any, default: str) -> str:
    """One element is the same in every element."""
    return _FILL if getattr(v.aval, "size", 1) == 1 else default


def _without_shards(eqn: Any, labels: list[str]) -> list[str]:
    name = eqn.primitive.name
    if name.startswith("reduce") and any(
        label == _FILL and getattr(v.aval, "size", 1) > 1 for v, label in zip(eqn.invars, labels, strict=True)
    ):
        raise NotElementwise(name, "a constant of its shape")
    spreads = name in _POINTWISE or name == "broadcast_in_dim"
    default = _FILL if spreads and all(label == _FILL for label in labels) else _WHOLE
    return [_label(v, default) for v in eqn.outvars]


def _through(eqn: Any, labels: list[str]) -> list[str]:
    name = eqn.primitive.name
    if name in _CALLS:
        return check_elementwise(inner_jaxpr(eqn), labels)
    if name == "cond":
        _refuse_shard(name, labels[0])
        return _join([check_elementwise(branch, labels[1:]) for branch in eqn.params["branches"]])
    if name == "while":
        return _through_while(eqn, labels)
    if name == "scan":
        return _through_scan(eqn, labels)
    shards = [i for i, label in enumerate(labels) if _is_shard(label)]
    path, shape = labels[shards[0]], eqn.invars[shards[0]].aval.shape
    keeps_shape = all(v.aval.shape == shape for v in [*eqn.outvars, *(eqn.invars[i] for i in shards)])
    pointwise = name in _POINTWISE or (name in ("broadcast_in_dim", "reshape") and keeps_shape)
    if not pointwise or not keeps_shape:
        raise NotElementwise(name, path)
    if any(label == _WHOLE for label in labels):
        raise NotElementwise(f"{name} with an array that is not cut alike", path)
    return [path] * len(eqn.outvars)


def _through_while(eqn: Any, labels: list[str]) -> list[str]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = labels[:num_cond], labels[num_cond : num_cond + num_body]
    carry = _fixed_point(
        lambda c: check_elementwise(eqn.params["body_jaxpr"], body_consts + c), labels[len(body_consts) + num_cond :]
    )
    (stop,) = check_elementwise(eqn.params["cond_jaxpr"], cond_consts + carry)
    _refuse_shard("while", stop)
    return carry


def _through_scan(eqn: Any, labels: list[str]) -> list[str]:
    body, (num_consts, num_carry) = inner_jaxpr(eqn), scan_split(eqn)
    consts, xs = labels[:num_consts], labels[num_consts + num_carry :]
    for label in xs:
        _refuse_shard("scan", label)
    carry = labels[num_consts : num_consts + num_carry]
    carry = _fixed_point(lambda c: check_elementwise(body, consts + c + xs)[:num_carry], carry)
    stacked = check_elementwise(body, consts + carry + xs)[num_carry:]
    for label in stacked:
        _refuse_shard("scan", label)
    return carry + [_WHOLE] * len(stacked)


def _fixed_point(step: Any, labels: list[str]) -> list[str]:
    while (new := _join([labels, step(labels)])) != labels:
        labels = new
    return labels


def _join(rows: list[list[str]]) -> list[str]:
    """The least harmless of each: a shard, else WHOLE, else FILL."""
    return [max(column, key=lambda label: (_is_shard(label), label == _WHOLE)) for column in zip(*rows, strict=True)]


def _refuse_shard(operation: str, label: str) -> None:
    if _is_shard(label):
        raise NotElementwise(operation, label)
