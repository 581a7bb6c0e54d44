"""Changes a traced program: runs it again with some equations entered or replaced, or has others follow some."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, Tree, Var
from jaxshard.programs.jaxprs import (
    inner_jaxpr,
    is_literal,
    linear_solver,
    open_jaxpr,
    run_equations,
    scan_split,
    without_consts,
)
from jaxshard.programs.primitives import CALLS, CONSTRAINT, CONTROL, INLINED, REMAT, SCAN, SOLVES, kind_of

Values: TypeAlias = Sequence[jax.Array]
Instead: TypeAlias = Callable[[Equation, Values], list[jax.Array] | None]
Depend: TypeAlias = Callable[[OpenJaxpr, Sequence[bool]], set[Var]]
Then: TypeAlias = Callable[[jax.Array, int], jax.Array]


def rerun(
    program: Jaxpr, values: Values, enters: Callable[[Equation], bool], instead: Instead | None = None
) -> list[jax.Array]:
    """The results of a program.

    Args:
      enters: whether to enter an equation. The program inside a call or control flow is then run again in the same way:
        a call is inlined, a loop or a branch is traced anew.
      instead: computes the results of an equation that `enters` chose, from its operands; None: as above.
    """
    jaxpr = open_jaxpr(program)
    env: dict[Var, Tree] = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Equation] = []  # equations since the last entered one
    for eqn in jaxpr.eqns:
        if not enters(eqn):
            plain.append(eqn)
            continue
        run_equations(jaxpr, plain, env)
        plain = []
        operands = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        outs = (instead(eqn, operands) if instead else None) or _inside(eqn, operands, enters, instead)
        if outs is None:
            run_equations(jaxpr, [eqn], env)
        else:
            env |= dict(zip(eqn.outvars, outs, strict=True))
    run_equations(jaxpr, plain, env)
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def flat(program: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """(the program with its calls inlined and its constants as further inputs, these constants)."""
    program, consts = without_consts(program)

    def run(*values: jax.Array) -> list[jax.Array]:
        return rerun(program, values, lambda eqn: eqn.primitive.name in CALLS | SOLVES)

    trace: Any = jax.make_jaxpr(run)  # pyright: ignore[reportUnknownMemberType]
    written, more = without_consts(trace(*(_shape_of(v.aval) for v in open_jaxpr(program).invars)))
    return written, [*consts, *more]


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype without the sharding, which may name the mesh that the program was traced on."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def anew(program: Jaxpr, values: Values, changed: Mapping[int, Mapping[str, Any]] | None = None) -> list[jax.Array]:
    """The results of a program that was traced elsewhere, perhaps on another mesh that its types and parameters name.

    Args:
      changed: equation id -> parameters that replace its own.
    """

    def instead(eqn: Equation, operands: Values) -> list[jax.Array] | None:
        if eqn.primitive.name == CONSTRAINT:
            return list(operands)
        if eqn.primitive.name in CALLS | CONTROL | SOLVES:
            return None
        return bound(
            eqn, operands, dict.fromkeys(_SHARDINGS & eqn.params.keys()) | dict((changed or {}).get(id(eqn), {}))
        )

    return rerun(program, values, lambda _: True, instead)


_SHARDINGS = frozenset({"sharding", "out_sharding"})  # parameters that name the mesh that it was traced on


def bound(eqn: Equation, operands: Values, changed: Mapping[str, Any] | None = None) -> list[jax.Array]:
    """The results of an equation's operation on other operands, with some parameters changed."""
    params = eqn.primitive.get_bind_params(eqn.params | dict(changed or {}))
    made = eqn.primitive.bind(*operands, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _inside(
    eqn: Equation, values: Values, enters: Callable[[Equation], bool], instead: Instead | None
) -> list[jax.Array] | None:
    """The results of a call, or of control flow; None for any other operation."""
    kind, params = kind_of(eqn), eqn.params

    def run(program: Jaxpr, values: Values) -> list[jax.Array]:
        return rerun(program, values, enters, instead)

    if kind == "call":
        return run(inner_jaxpr(eqn), values)
    if kind == "solve":
        return run(*linear_solver(eqn, values))
    if kind == "cond" and params.get("branches_platforms") is None:
        branches = [functools.partial(_branch, run, one) for one in params["branches"]]
        return lax.switch(values[0], branches, *values[1:])  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if kind == "while":
        return _while(eqn, values, run)
    if kind == "scan":
        return _scan(eqn, values, run)
    return None


def _branch(run: Callable[[Jaxpr, Values], list[jax.Array]], program: Jaxpr, *values: jax.Array) -> list[jax.Array]:
    return run(program, values)


def _while(eqn: Equation, values: Values, run: Callable[[Jaxpr, Values], list[jax.Array]]) -> list[jax.Array]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
    under_vmap = open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.ndim > 0

    def goes_on(carry: list[jax.Array]) -> jax.Array:
        return run(eqn.params["cond_jaxpr"], [*of_cond, *carry])[0]

    def body(carry: list[jax.Array]) -> list[jax.Array]:
        return run(eqn.params["body_jaxpr"], [*of_body, *carry])

    def body_of_many(carry: list[jax.Array]) -> list[jax.Array]:
        """Loops that have ended keep their carry; the predicate's dims are the first dims of all arrays."""
        made, yes = body(carry), goes_on(carry)
        wide = [yes.reshape(yes.shape + (1,) * (x.ndim - yes.ndim)) for x in made]
        return [jnp.where(one, new, old) for one, new, old in zip(wide, made, carry, strict=True)]

    start = list(values[num_cond + num_body :])
    if under_vmap:
        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), body_of_many, start)
    return lax.while_loop(goes_on, body, start)


def _scan(eqn: Equation, values: Values, run: Callable[[Jaxpr, Values], list[jax.Array]]) -> list[jax.Array]:
    num_consts, num_carry = scan_split(eqn)

    def body(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = run(inner_jaxpr(eqn), [*values[:num_consts], *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    start, xs = list(values[num_consts : num_consts + num_carry]), list(values[num_consts + num_carry :])
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, start, xs, **how)
    return [*carry, *stacked]


# Products of activations and weights.


def followed(program: Jaxpr, by_rows: Sequence[bool], num_rows: int, depend: Depend, then: Then) -> Jaxpr:
    """The program, in which each product of activations and weights is replaced by `then(product, dim of rows)`.

    Activations depend on the batch, and weights do not. Products in a loop over layers, a remat or a call count too.

    Args:
      by_rows: for each input, whether it depends on the batch.
      num_rows: the size of the batch's dim. Products in which it has another size, as it is merged with others, stay.
      depend: the variables of a program that depend on marked inputs.
      then: traced for each product.
    """
    return _Rewriting(num_rows, depend, then).rewritten(program, by_rows)


class _Rewriting:
    def __init__(self, num_rows: int, depend: Depend, then: Then):
        self._num_rows, self._depend, self._then = num_rows, depend, then
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[Jaxpr, Jaxpr]] = {}  # the first is kept alive: its id

    def rewritten(self, program: Jaxpr, by_rows: Sequence[bool]) -> Jaxpr:
        """One program for all equal ones, so that JAX differentiates and lowers it once."""
        key = id(open_jaxpr(program)), tuple(by_rows)
        if key not in self._known:
            inner = open_jaxpr(program)
            new = inner.replace(eqns=self._equations(inner, by_rows))
            whole = program.replace(jaxpr=new) if hasattr(program, "jaxpr") else new
            self._known[key] = program, whole
        return self._known[key][1]

    def _equations(self, jaxpr: OpenJaxpr, by_rows: Sequence[bool]) -> list[Equation]:
        depend = self._depend(jaxpr, by_rows)
        found = list[Equation]()
        for eqn in jaxpr.eqns:
            known = [not is_literal(v) and v in depend for v in eqn.invars]
            name = eqn.primitive.name
            if name in INLINED or name in REMAT or name == SCAN:
                found.append(self._call(eqn, known, [v in depend for v in eqn.outvars]))
            else:
                found += self._followed(eqn, known)
        return found

    def _call(self, eqn: Equation, known: list[bool], outs: list[bool]) -> Equation:
        if eqn.primitive.name == SCAN:  # what a step leaves behind is what the next one takes
            consts, count = scan_split(eqn)
            known[consts : consts + count] = outs[:count]
        inner = inner_jaxpr(eqn)
        key = next(key for key, value in eqn.params.items() if value is inner)
        return eqn.replace(params={**eqn.params, key: self.rewritten(inner, known)})

    def _followed(self, eqn: Equation, known: Sequence[bool]) -> list[Equation]:
        """The equation, and `then` if it is a product of activations and weights."""
        dim = _dim_of_rows(eqn, known, self._num_rows)
        if dim is None:
            return [eqn]
        result = eqn.outvars[0]
        trace: Any = jax.make_jaxpr(self._then, static_argnums=1)  # pyright: ignore[reportUnknownMemberType]
        after = open_jaxpr(trace(result.aval, dim))
        *before, last = after.eqns
        return [eqn.replace(outvars=after.invars), *before, last.replace(outvars=[result])]


def _dim_of_rows(eqn: Equation, by_rows: Sequence[bool], num_rows: int) -> int | None:
    """The dim of a product's result in which the batch's rows lie; None of any other operation, or if unknown."""
    if kind_of(eqn) not in ("conv", "dot") or sum(by_rows) != 1:
        return None
    place = by_rows.index(True)
    dims = [d for d in _dims_of(eqn, place) if eqn.outvars[0].aval.shape[d] == num_rows]
    return dims[0] if dims else None


def _dims_of(eqn: Equation, place: int) -> Sequence[int]:
    """The dims of a product's result in which an operand's rows may lie."""
    if kind_of(eqn) == "conv":
        return [eqn.params["dimension_numbers"].out_spec[0]] if place == 0 else []
    contracted, batched = eqn.params["dimension_numbers"]
    first = len(batched[0])
    free = [v.aval.ndim - first - len(c) for v, c in zip(eqn.invars, contracted, strict=True)]
    own = range(first, first + free[0]) if place == 0 else range(first + free[0], first + sum(free))
    return [*range(first), *own]
