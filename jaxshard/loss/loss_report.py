"""What is told of a loss: the findings of `check`, the price of its view, and errors in its trace."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxshard.base.types import Names, Tree
from jaxshard.system.text import html_table, size_in_words

_NEEDS_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)


@dataclasses.dataclass(frozen=True)
class LossDifference:
    """The distance of a loss and its gradients from those of the batch as given.

    Attributes:
      loss: `|difference| / |loss|`.
      gradients: path -> `|difference| / |gradient|` (norms), for each parameter.
      factor: the loss divided by that of the batch as given.
    """

    loss: float
    gradients: Mapping[str, float]
    factor: float

    @property
    def worst(self) -> tuple[str, float]:
        """(the parameter whose gradient differs most, its difference)."""
        return max(self.gradients.items(), key=lambda each: or_inf(each[1]), default=("", 0.0))

    def exceeds(self, tolerance: float) -> bool:
        """Whether the loss or a gradient differs by more than this, or is not finite."""
        return not (or_inf(self.loss) <= tolerance and or_inf(self.worst[1]) <= tolerance)


@dataclasses.dataclass(frozen=True, repr=False)
class LossReport:
    """The report of `check`, shown as a table.

    Attributes:
      ok: whether the loss and all gradients stayed the same.
      loss: the loss of the batch as given.
      differences: way of distributing rows -> `Difference`.
      tolerance: the largest difference that rounding explains.
      causes: the likely causes, in words, the likeliest first.
      notes: the comparisons that were not made, and why.
    """

    ok: bool
    loss: float
    differences: Mapping[str, LossDifference]
    tolerance: float
    causes: tuple[str, ...]
    notes: tuple[str, ...]

    def _parts(self) -> tuple[str, list[tuple[str, str, str, str]], list[str]]:
        """The verdict; for each comparison its name, verdict and the differences of loss and gradients; notes."""
        head = "The loss is a mean over rows" if self.ok else "The loss is NOT a mean over rows"
        verdict = f"{head}: {self.loss:.6g}; relative differences up to {self.tolerance:.1e} are rounding."
        rows: list[tuple[str, str, str, str]] = []
        for name, found in self.differences.items():
            path, far = found.worst
            sign = "differs" if found.exceeds(self.tolerance) else "same"
            rows.append((name, sign, f"{found.loss:.1e}", f"{far:.1e} ({path})"))
        return verdict, rows, [*(f"likely: {cause}" for cause in self.causes), *(f"note: {n}" for n in self.notes)]

    def __repr__(self) -> str:
        verdict, rows, notes = self._parts()
        lines = [f"  {name}: {sign}; loss {loss}, gradients at most {far}" for name, sign, loss, far in rows]
        return "\n".join([verdict, *lines, *(f"  {note}" for note in notes)])

    def _repr_html_(self) -> str:
        verdict, rows, notes = self._parts()
        return html_table(
            [("rows", "result", "loss differs by", "gradients differ by at most"), *rows], [verdict, *notes]
        )


class RowsError(ValueError):
    """A loss is not a mean of independent rows. `report`: the report of `check`."""

    def __init__(self, report: LossReport):
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


def or_inf(x: float) -> float:
    return x if math.isfinite(x) else math.inf


class Price(NamedTuple):
    """What a device sends and holds for a loss and its gradients, in bytes: (in the local view, in the global one)."""

    wire: tuple[float, float]
    peak: tuple[float, float]

    @property
    def is_high(self) -> bool:
        """Whether the global view sends or holds 10% more, and 1 MiB at least."""
        return any(whole - local > max(0.1 * local, 2**20) for local, whole in self)

    def __str__(self) -> str:
        (sent, sent_here), (held, held_here) = ([size_in_words(int(x)) for x in reversed(both)] for both in self)
        return (
            f"By the plan, each device sends {sent} and holds {held} for the loss and its gradients; with only its own "
            f"rows it would send {sent_here} and hold {held_here}"
        )


FOLDED = (
    "; each device uses its own keys, so random numbers differ from one device (one key per row, or, with one "
    'microbatch, loss_view="global" draws the same numbers)'
)


def in_words(why: str, price: Price | None) -> str:
    """That a loss sees all rows, why, and at what price."""
    given = f": {why}".removesuffix(".") if why else ""
    after = f". {price}." if price else "." if why.endswith(".") else ""
    return f"global view: the loss sees all rows of a microbatch, and XLA partitions it{given}{after}"


# Errors in the trace of a loss.


def noted(error: Exception, batch: Tree, args: tuple[Tree, ...], parts: int, part: str, rows_in_args: str) -> Exception:
    """The error, with notes: how many rows the loss gets, how it is called, that flags are traced."""
    if jax.tree.leaves(args) and isinstance(error, _NEEDS_VALUES):
        error.add_note(
            "loss_fn's further arguments are traced, including Python numbers and flags. Let the loss close over those "
            "whose values it needs: functools.partial(loss_fn, training=True)."
        )
    if "PRNG key" in str(error):
        error.add_note("Pass a key, jax.random.key(0), not its seed: step(params, state, batch, key).")
    if isinstance(error, KeyError):
        error.add_note("loss_fn is called as loss_fn(params, batch, *args).")
    if parts > 1 and "shape" in str(error):
        mine = jax.tree.leaves(batch)[0].shape[0]
        error.add_note(
            f"loss_fn sees {mine} of the batch's {mine * parts} rows: those of {part}. If some rows belong together, "
            f"{part} needs complete groups."
        )
        if rows_in_args:
            error.add_note(rows_in_args)
    return error


def explained(error: Exception, checked: bool, axes: Mapping[str, int]) -> Exception:
    """JAX's error about axes, varying types or sharding constraints, with the cure; any other error unchanged."""
    text = str(error)
    if isinstance(error, NameError):
        if "axis name" in text:
            error.add_note(f"loss_fn: the mesh has the axes {', '.join(axes)}")
        return error
    if isinstance(error, ValueError):
        return ValueError(_about_constraints(text)) if _is_about_constraints(text) else error
    carried = "{V:" in text and any(word in text for word in ("carry", "scan", "while", "branch"))
    if not checked or not carried or len(set(re.findall(r"\b([a-z]+\d+\[[\d,]*\])", text))) > 1:
        return error  # ours, or about shapes and dtypes
    return TypeError(
        "loss_fn: with tensor or pipeline axes larger than 1, JAX checks varying types, and a value's type changed, "
        "most often the carry of a lax.scan or while_loop that starts as a constant. Cast the initial carry to its "
        f"later type: jax.lax.pcast(carry, axes, to='varying'), axes being those named below. JAX said: {text}"
    )


def _is_about_constraints(text: str) -> bool:
    return "with_sharding_constraint" in text or ("Resource axis" in text and "not found in mesh" in text)


def _about_constraints(text: str) -> str:
    return (
        "loss_fn: it constrains the sharding of a value, by jax.lax.with_sharding_constraint or flax's "
        "nn.with_logical_constraint, but each device computes its own rows, and no axis is left to constrain. Remove "
        "the constraint, or call the step outside nn.logical_axis_rules; shard params with specs= (auto_axes='tensor' "
        f"leaves an axis to XLA; then only constraints over that axis work). JAX said: {text.splitlines()[0]}"
    )


def form_of(out: Tree) -> str:
    """What a loss returned, for an error: "one array", "a tuple of 3", or the type."""
    if isinstance(out, tuple | list):
        return f"a {type(out).__name__} of {len(out)}"
    return "one array" if hasattr(out, "aval") else type(out).__name__


def no_rows(path: str, shape: tuple[int, ...]) -> ValueError:
    """The error about an output of `predict` that has no dim of rows."""
    return ValueError(
        f"predict: output {path} has shape {shape} and no dim with the rows of the batch in order; return arrays of "
        "(rows, ...), or compute averages with jaxshard.evaluate(..., has_aux=True)"
    )


def parts_of_rows(per_row: bool, path: str, shape: tuple[int, ...], axes: Names) -> ValueError:
    """The error about an output of `predict`, or a leaf of aux, that has a part of its rows on each device."""
    return ValueError(
        f"{'predict: output' if per_row else 'loss_fn: aux leaf'} {path} has shape {shape} with the batch's rows, of "
        f"which each device along {axes} may have another part: return it complete, as jax.lax.all_gather(x, "
        f"{axes[0]!r}, axis=1, tiled=True) or jax.lax.psum(x, {axes[0]!r})"
    )
