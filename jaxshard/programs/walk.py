"""One walk over a traced program: it derives an answer for each value from answers for the inputs.

A question about programs is a subclass of `Walk` that answers it for one operation, and joins two answers.
"""

import functools
from collections.abc import Sequence
from typing import Generic, TypeVar

from jaxshard.base.types import Equation, Jaxpr, Var
from jaxshard.programs.jaxprs import inner_jaxpr, is_literal, is_ref, linear_solver, open_jaxpr, scan_split, subprograms
from jaxshard.programs.primitives import ONLY_READS, kind_of

V = TypeVar("V")


class Walk(Generic[V]):
    """Follows values through calls, branches, loops, linear solves and `shard_map`.

    Loops are walked to a fixed point, so there must be finitely many answers, and `join` must only go up. The answer is
    `unknown` for the results of any other operation that holds a program (a kernel, a custom loop), for mutable arrays
    after a write, and for the results of loops and calls that take one.

    Attributes:
      nothing: the answer for a constant.
    """

    nothing: V

    def of(self, eqn: Equation, known: Sequence[V]) -> Sequence[V]:
        """The answers for an operation's results, from those for its operands."""
        raise NotImplementedError

    def join(self, one: V, other: V) -> V:
        """The answer for a value that is one of two."""
        raise NotImplementedError

    def unknown(self, eqn: Equation, known: Sequence[V]) -> V:
        """The safe answer for the results of an operation whose effect on its operands is unknown."""
        raise NotImplementedError

    def literal(self, v: Var) -> V:
        """The answer for a number written into the program."""
        return self.nothing

    def kept(self, v: Var, value: V) -> V:
        """The answer for a variable, once its type is known too."""
        return value

    def slice(self, value: V) -> V:
        """The answer for one element of what a scan runs over."""
        return value

    def stack(self, value: V) -> V:
        """The answer for the array of a scan's results."""
        return value

    def chosen(self, by: V, values: list[V]) -> list[V]:
        """The answers for the results of a branch or a loop, given the answer for its predicate."""
        return values

    def called(self, eqn: Equation, known: Sequence[V]) -> Sequence[V]:
        """The answers for the results of a call; custom derivatives and rematerialization are calls, too."""
        return self.through(inner_jaxpr(eqn), known)

    def solved(self, eqn: Equation, known: Sequence[V]) -> Sequence[V]:
        """The answers for the results of a `custom_linear_solve`."""
        return self.through(*linear_solver(eqn, known))

    def through(self, program: Jaxpr, values: Sequence[V]) -> list[V]:
        """The answers for a program's outputs, from those for its inputs."""
        jaxpr = open_jaxpr(program)
        env = dict.fromkeys(jaxpr.constvars, self.nothing) | dict(zip(jaxpr.invars, values, strict=True))
        for eqn in jaxpr.eqns:
            known = [self.literal(v) if is_literal(v) else env[v] for v in eqn.invars]
            outs = self._equation(eqn, known)
            env |= {v: self.kept(v, out) for v, out in zip(eqn.outvars, outs, strict=True)}
            if eqn.effects and eqn.primitive.name not in ONLY_READS:  # what writes has an effect
                refs = [v for v in eqn.invars if is_ref(v)]
                env |= {v: self.join(env[v], self.unknown(eqn, known)) for v in refs}
        return [self.literal(v) if is_literal(v) else env[v] for v in jaxpr.outvars]

    def _equation(self, eqn: Equation, known: list[V]) -> Sequence[V]:
        kind = kind_of(eqn)
        if kind == "pointwise":  # most are, and hold no program
            return self.of(eqn, known)
        holds_programs = any(True for _ in subprograms(eqn))
        if holds_programs and any(map(is_ref, eqn.invars)):
            return [self.unknown(eqn, known)] * len(eqn.outvars)
        if kind == "call":
            return self.called(eqn, known)
        if kind == "shard_map":
            return self.through(inner_jaxpr(eqn), known)
        if kind == "solve":
            return self.solved(eqn, known)
        if kind == "cond":
            columns = zip(*(self.through(branch, known[1:]) for branch in eqn.params["branches"]), strict=True)
            return self.chosen(known[0], [functools.reduce(self.join, column) for column in columns])
        if kind == "scan":
            return self.scanned(eqn, known)
        if kind == "while":
            return self._while(eqn, known)
        return [self.unknown(eqn, known)] * len(eqn.outvars) if holds_programs else self.of(eqn, known)

    def scanned(self, eqn: Equation, known: Sequence[V]) -> list[V]:
        """The answers for the results of a scan."""
        consts, num_carry = scan_split(eqn)
        xs = [self.slice(x) for x in known[consts + num_carry :]]
        outs = self._settled(inner_jaxpr(eqn), known[:consts], known[consts : consts + num_carry], xs)
        return [*outs[:num_carry], *map(self.stack, outs[num_carry:])]

    def _while(self, eqn: Equation, known: list[V]) -> list[V]:
        start, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = self._settled(eqn.params["body_jaxpr"], known[start : start + consts], known[start + consts :], [])
        (goes_on,) = self.through(eqn.params["cond_jaxpr"], [*known[:start], *carry])
        return self.chosen(goes_on, carry)

    def _settled(self, body: Jaxpr, consts: Sequence[V], carry: Sequence[V], xs: Sequence[V]) -> list[V]:
        """(carry, results) of a loop's body, after any number of iterations."""
        while True:
            outs = self.through(body, [*consts, *carry, *xs])
            new = [self.join(a, b) for a, b in zip(carry, outs[: len(carry)], strict=True)]
            if new == [*carry]:
                return [*new, *outs[len(carry) :]]
            carry = new
