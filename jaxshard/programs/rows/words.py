"""The messages about a loss that is not a mean over rows: the operation, its line, the cure."""

from collections.abc import Sequence

from jaxshard.programs.primitives import ADDS_UP, GUARDS, OVER_DEVICES
from jaxshard.programs.rows.labels import Label, Trail, Trouble, near
from jaxshard.programs.source import line_of

INTENDED = 'To use only the rows of each device on purpose, pass loss_view="local".'


def named(trail: Trail) -> str:
    """An operation and its line: "`dot_general` at model.py:12"."""
    if not trail:
        return "a number in it"
    line = line_of(trail)
    return f"`{trail[-1].primitive.name}`" + (f" at {line}" if line else "")


def _axes(names: Sequence[str]) -> str:
    """Axis names as the argument of a collective."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def trouble_of(label: Label) -> Trouble:
    """Why a value has no formula by which devices' values could be averaged."""
    if label.trouble is not None:
        return label.trouble
    if label.kind == "total":
        return Trouble("statistic", label.trail, extreme=label.by != "sum")
    return Trouble("unknown", label.trail)


_CURES = {
    "ratio": (
        "divides one sum over rows by another, but each device has only its own rows. Return (the first sum, the "
        "second) and set weighted=True, which divides the sums over all devices."
    ),
    "pairs": (
        "combines different rows, but each device has only its own rows. Gather the other operand: "
        "jax.lax.all_gather(x, {axes}, tiled=True)."
    ),
    "count": (
        "combines terms that depend on the number of rows with terms that do not; each device has fewer rows. "
        "{cure}; or return (a sum, its weight) and set weighted=True, which divides the sums over all devices; do "
        "not divide anything else by the number of rows."
    ),
    "some": (
        "selects rows by their positions in the batch, but each device has only its own rows. Select, mix or reorder "
        "rows when you build the batch; or give the batch a leaf with a weight for each row, and set weighted=True; or "
        "gather each array that it selects from: jax.lax.all_gather(x, {axes}, tiled=True)."
    ),
    "position": (
        "depends on the rows' positions in the batch, but each device counts from its own first row. Put the array "
        "that differs from row to row into the batch as a leaf."
    ),
    "drawn": (
        "uses random numbers whose key is a constant of the loss: they are the same on every device and at every step. "
        "Pass the key as a further argument, step(params, state, batch, key), and a new key at each step."
    ),
}


def of_trouble(trouble: Trouble, split_axes: Sequence[str], *, weighted: bool = False) -> str:
    """The message for a loss that is not split over devices by a formula."""
    cure = "Multiply terms without rows (an L2 penalty) by the weight" if weighted else "Return the mean over rows"
    axes, here = _axes(split_axes), named(trouble.trail)
    if trouble.cause == "statistic":
        return f"{_of_statistic(trouble, axes)} {INTENDED}"
    if trouble.cause == "unknown":
        return of_unknown(trouble)
    return f"{here} {_CURES[trouble.cause].format(axes=axes, cure=cure)} {INTENDED}"


def of_unknown(trouble: Trouble) -> str:
    """The message for an operation that is not looked into."""
    return f"the analysis does not support {named(trouble.trail)}"


def _of_statistic(trouble: Trouble, axes: str) -> str:
    """The message for a loss that uses a statistic of one device's rows."""
    here = named(trouble.trail)
    of = named(trouble.of) if trouble.of and trouble.of[-1] is not trouble.trail[-1] else ""
    used = f"{of} is computed over the rows, and {here} uses it" if of else f"{here} is computed over the rows"
    summed = trouble.of or trouble.trail
    if not summed or summed[-1].primitive.name not in ADDS_UP:
        return (
            f"{used}, but each device has only its own rows. Take the rows of all devices first: jax.lax.all_gather(x, "
            f"{axes}, tiled=True)."
        )
    if of and trouble.trail[-1].primitive.name in GUARDS:
        return (
            f"{used}, but each device has only its own rows. If it guards the division of another sum over rows by "
            "this one, return (that sum, this one) and set weighted=True, which divides the sums over all devices and "
            f"skips a batch of weight 0. If it does not, sum it over all devices first, jax.lax.psum(x, {axes}). "
            "jaxshard.check verifies the loss numerically."
        )
    return (
        f"{used}, but each device has only its own rows. Compute it over all devices: jax.lax.pmean(x, {axes}) of a "
        f"mean, jax.lax.psum(x, {axes}) of a sum or a count; or axis_name={axes} in a BatchNorm. A variance is the "
        "mean of the squares minus the square of the mean."
    )


_AVERAGED = "and aux is averaged over devices and microbatches"
_ROWS = "Return per-row values instead, which come back complete, and compute it from them"


def of_aux(trouble: Trouble, split_axes: Sequence[str]) -> str:
    """The end of the message "aux leaf x ..." if averaging over devices and microbatches may change it."""
    axes = _axes(split_axes)
    over_all = f"sum over all devices, jax.lax.psum(x, {axes})"
    if trouble.extreme and trouble.trail[-1].primitive.name in OVER_DEVICES:
        over_all = f"jax.lax.{OVER_DEVICES[trouble.trail[-1].primitive.name]}(x, {axes})"
    known = "is not known to be a mean over rows" if trouble.cause == "unknown" else "is not a mean over rows"
    return f"{known} ({named(trouble.trail)}), {_AVERAGED}. {_ROWS}; or, with microbatches=1, {over_all}"


def of_sum_in_aux(label: Label, split_axes: Sequence[str], by_weight: bool) -> str:
    """The same for a sum."""
    if by_weight:
        return f"is a mean over rows ({named(label.trail)}), and aux is averaged by the weights of devices. {_ROWS}"
    cure = f"Return a mean; or, with microbatches=1, jax.lax.psum(x, {_axes(split_axes)})"
    return f"is a sum over rows ({named(label.trail)}), {_AVERAGED}. {cure}"


def of_outputs() -> str:
    """The message for per-row outputs that depend on the number of rows."""
    return (
        "its outputs depend on the number of rows, and each device has fewer rows. Do not divide by the number of "
        f"rows. {INTENDED}"
    )


def of_microbatches(label: Label) -> str:
    """The message for a pipeline whose loss depends on its number of microbatches."""
    return (
        f"a pipeline averages the losses of its microbatches, and {named(trouble_of(label).trail)} makes them "
        "something other than means over rows. Let last_fn return the mean over its rows; or, for masks and weights, "
        f"(sum, weight), both sums over rows, and set weighted=True. {INTENDED}"
    )


def of_rule(rule: Trail) -> str:
    """The message for a gradient from a user's own rule."""
    return f"its gradient comes from the custom rule of {named(rule)}, which may mix rows"


def of_other_programs(trail: Trail) -> str:
    """The message for a loss that does other things where there are more rows."""
    at = f", from {named(trail)} on" if trail else ""
    return f"with more rows it does different operations{at}"


def of_sum(loss: Label, parts: int, *, weighted: bool) -> str:
    """The message for a loss that grows with its rows in the wrong way."""
    here = f" ({named(loss.trail)})" if loss.trail else ""
    if weighted:
        return (
            f"weighted=True needs (a sum over rows, the sum of their weights), and when rows are added, only one of "
            f"the two grows{here}. Return both as sums. {INTENDED}"
        )
    if loss.kind == "same" and loss.trail and near(loss.ratio, 1 / parts):
        return (
            f"{named(loss.trail)} sums means over all devices, so it is too large by the number of devices. Return the "
            f"mean of this device's rows, or use jax.lax.pmean instead of jax.lax.psum. {INTENDED}"
        )
    if loss.kind == "total" and near(loss.ratio, 1.0):
        return (
            f"it is a sum over rows{here}, or is not divided by the number of its rows, but the losses of all devices "
            f"are averaged. Return the mean; or (sum, number of rows) with weighted=True. " + INTENDED
        )
    return (
        f"it changes when all rows are repeated{here}, but the losses of all devices are averaged. Return the mean. "
        + INTENDED
    )
