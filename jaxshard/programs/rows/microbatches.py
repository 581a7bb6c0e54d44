"""Parts of a loss that run in microbatches of their own (a pipeline), and average their losses.

How such a part is scheduled is no matter for the proof. While a loss is traced to be judged, each part is recorded
with a program of its own: the loss of some rows at once, on one device. A proof compares that of one microbatch with
that of the whole batch.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxshard.base.types import Equation, Jaxpr, Tree
from jaxshard.programs.jaxprs import open_jaxpr, without_consts
from jaxshard.programs.rows.labels import SAME, Label, Ratio, as_total, lost, near, worst
from jaxshard.programs.rows.pairs import scale_alike

AXIS = "microbatches"  # in a proof, beside the mesh axes that split rows


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatched:
    """A recorded part.

    Attributes:
      program: from (the inputs of the part, the numbers of chunk and microbatch, the constants of its functions) to
        (the loss,), or (its sum, its weight); None if it cannot be traced with so many rows.
      of_batch: which inputs are leaves of the batch.
      count: the number of microbatches.
      rows: of each, in `program`.
    """

    program: Jaxpr | None
    of_batch: tuple[bool, ...]
    count: int
    rows: int

    @property
    def weighted(self) -> bool:
        """Whether it adds up (sum, weight), instead of averaging losses."""
        return self.program is not None and len(open_jaxpr(self.program).outvars) > 1


Found: TypeAlias = list[Microbatched]

_recording: contextvars.ContextVar[tuple[Found, int | None] | None] = contextvars.ContextVar("recording", default=None)
_known: weakref.WeakValueDictionary[str, Microbatched] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_NAME = "jaxshard_microbatched_"


@contextlib.contextmanager
def recording(found: Found, parts: int | None) -> Iterator[None]:
    """Within it, parts are recorded with the program of one microbatch; or of the whole batch, of `parts` devices.

    `found` keeps them alive.
    """
    token = _recording.set((found, parts))
    try:
        yield
    finally:
        _recording.reset(token)


def record(
    run: Callable[[Tree, Tree], Tree],
    of_rows: Callable[[Tree, Tree, jax.Array, jax.Array], Sequence[Tree]],
    given: Tree,
    batch: Tree,
    count: int,
) -> Tree:
    """`run(given, batch)`, a part with `count` microbatches; while losses are recorded, in a call by which it is found.

    `of_rows(given, rows of the batch, chunk, microbatch)` computes the same of these rows at once.
    """
    recorded = _recording.get()
    if recorded is None:
        return run(given, batch)
    found, parts = recorded
    total = jax.tree.leaves(batch)[0].shape[0]
    each = total // (count * (parts or 1))
    rows = each if parts is None else total

    def traced(rows: int) -> tuple[Jaxpr, list[jax.Array]]:
        some = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (rows, *x.shape[1:])), batch))
        leaves, treedef = jax.tree.flatten((given, some))
        trace = jax.make_jaxpr(lambda *xs: of_rows(*jax.tree.unflatten(treedef, xs[:-2]), *xs[-2:]))
        return without_consts(trace(*leaves, jnp.int32(0), jnp.int32(0)))

    try:
        program, consts = traced(rows)
        if each == 1:  # a dim of one row may be broadcast as one of several is not
            one, (program, consts), (many, _) = program, traced(2 * rows), traced(4 * count * rows)
            program = program if scale_alike([one, program, many], [1, 2, 4 * count]) else None
    except Exception:  # of any type: it is the user's own code, on a batch of another size
        program, consts = None, []
    values, structure = jax.tree.flatten((given, batch))
    num_given = len(jax.tree.leaves(given))
    of_batch = tuple(i >= num_given for i in range(len(values)))
    part = Microbatched(program, of_batch, count, max(each, 2))

    def named(*operands: jax.Array) -> Tree:
        return run(*jax.tree.unflatten(structure, operands[: len(values)]))

    named.__name__ = f"{_NAME}{next(_numbers)}"
    _known[named.__name__] = part
    found.append(part)
    return jax.jit(named)(*values, *consts)


def microbatched(eqn: Equation) -> Microbatched | None:
    """The part that a call runs, if `record` made the call."""
    name = eqn.params.get("name")
    return _known.get(name) if isinstance(name, str) and name.startswith(_NAME) else None


def inputs(part: Microbatched, known: Sequence[Label]) -> list[Label]:
    """The labels of the inputs of a part's program, from those of its operands: last come what `record` gave it."""
    assert part.program is not None
    num_consts = len(open_jaxpr(part.program).invars) - len(part.of_batch) - 2
    labels = known[len(known) - len(part.of_batch) - num_consts :]
    labels = [_input(x, yes) for x, yes in zip(labels, [*part.of_batch, *[False] * num_consts], strict=True)]
    place = [SAME, Label("same", own=True)]  # of the chunk, and of the microbatch, which is folded into keys
    return [*labels[: len(part.of_batch)], *place, *labels[len(part.of_batch) :]]


def _input(label: Label, of_batch: bool) -> Label:
    if label.kind == "other" or not near(label.ratio, 1.0):
        return label if label.kind == "other" else lost("count", label.trail)
    fits = label.kind == "rows" and label.dim == 0 and label.outer in (0, 1) if of_batch else label.kind == "same"
    return lost("position", label.trail) if label.place or not fits else label


def ratio_of(label: Label, part: Microbatched) -> Ratio:
    """The ratio of a part's result, from that of the same result of one microbatch."""
    per = 1 / part.count if label.kind == "same" else 1.0
    scale = per if part.weighted else per * part.count
    return None if label.ratio is None else label.ratio * scale


def is_mean(labels: Sequence[Label], parts: int) -> bool:
    """Whether a part gives the same in any number of microbatches: a mean over rows, or sums for both results."""
    if worst(labels) or any(x.by != "sum" for x in labels):
        return False
    ratios = [as_total(x, parts).ratio for x in labels]
    return near(ratios[0], ratios[1] if len(ratios) > 1 else 1 / parts)
