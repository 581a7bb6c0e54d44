"""The messages about a loss that is not a mean over rows: the operation, its line, the cure."""

from collections.abc import Sequence

from jaxshard.programs.primitives import ADDS_UP, OVER_DEVICES
from jaxshard.programs.rows.labels import NO_POWER, Label, Mixed, Stat, Trail, is_guarded
from jaxshard.programs.source import line_of

INTENDED = 'If the rows of each device are meant, give loss_view="local".'


def named(trail: Trail) -> str:
    """An operation and its line: "`dot_general` at model.py:12"."""
    line = line_of(trail)
    return f"`{trail[-1].primitive.name}`" + (f" at {line}" if line else "")


def _axes(names: Sequence[str]) -> str:
    """Axis names as the argument of a collective."""
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))


def of_mixture(label: Mixed, split_axes: Sequence[str], microbatches: int) -> str:
    """The message for a loss that depends on several rows at a time."""
    axes, here = _axes(split_axes), named(label.trail)
    if label.kind == "ratio":
        return (
            f"{here} divides one sum over rows by another, and each device has rows of its own. Return "
            f"(the first sum, the second) and set weighted=True, which divides the sums over all devices. {INTENDED}"
        )
    if label.kind == "pairs":
        return (
            f"{here} computes with different rows together, and each device has rows of its own alone. Gather the "
            f"other side: jax.lax.all_gather(x, {axes}, tiled=True). {INTENDED}"
        )
    if label.kind == "count":
        return (
            f"{here} divides a sum over this device's rows by the number of all rows, and the losses of all devices "
            f"are averaged. Divide by the number of this device's rows: return the mean. {INTENDED}"
        )
    if label.kind == "some":
        return (
            f"{here} takes some of the rows, by their places in the batch, and each device has rows of its own alone. "
            "Choose, mix or reorder rows where the batch is made; or give it a leaf with a weight for each row, and "
            f"set weighted=True. {INTENDED}"
        )
    if label.kind == "position":
        return (
            f"{here} treats rows by their places in the batch, and each device counts from its own first row. Make the "
            f"array that differs from row to row a leaf of the batch. {INTENDED}"
        )
    if label.kind == "drawn":
        return (
            f"{here} uses random numbers, whose key is a constant of the loss: they are the same on every device and "
            "at every step. Pass the key as a further argument, step(params, state, batch, key), and another one at "
            f"each step. {INTENDED}"
        )
    if label.kind == "microbatch":
        return (
            f"{here} puts the rows of all devices together, but only those of one microbatch of {microbatches}. Set "
            f"microbatches=1. {INTENDED}"
        )
    return _of_statistic(label, axes)


def _of_statistic(label: Mixed, axes: str) -> str:
    """The message for a loss that uses a statistic of one device's rows."""
    here = named(label.trail)
    of = named(label.of) if label.of and label.of[-1] is not label.trail[-1] else ""
    used = f"{of} is taken over the rows, and {here} uses it" if of else f"{here} is taken over the rows"
    if (label.of or label.trail)[-1].primitive.name not in ADDS_UP:
        return (
            f"{used}, where each device has rows of its own alone. Take the rows of all devices first: "
            f"jax.lax.all_gather(x, {axes}, tiled=True). {INTENDED}"
        )
    if of and is_guarded(label):
        return (
            f"{used}, where each device has rows of its own alone. If it guards the division of another sum over rows "
            "by this one, return (that sum, this one) and set weighted=True, which divides the sums over all devices "
            f"and skips a batch of weight 0. If it does not, take it over all devices first, jax.lax.psum(x, {axes}). "
            f"jaxshard.check tells by numbers whether the loss is right. {INTENDED}"
        )
    return (
        f"{used}, where each device has rows of its own alone. Take it over all devices: jax.lax.pmean(x, {axes}) of a "
        f"mean, jax.lax.psum(x, {axes}) of a sum or a count; or axis_name={axes} in a BatchNorm. {INTENDED}"
    )


def of_aux(label: Label, weight: Label, split_axes: Sequence[str], weighted: bool) -> str:
    """The end of the message "aux leaf x ..." if averaging over devices and microbatches changes it; else ""."""
    axes = _axes(split_axes)
    if isinstance(label, Stat) and not (label.running or label.by_sum):
        return _of_sum_in_aux(label, axes, by_weight=weighted and isinstance(weight, Stat))
    if not isinstance(label, Mixed) or (weighted and label.quotient):  # the divisor may be the weight
        return ""
    if label.kind == "microbatch":
        return f"is of one microbatch's rows alone ({named(label.trail)}), {_AVERAGED}. {_ROWS}" if label.of else ""
    over_all = f"take its sums over all devices, jax.lax.psum(x, {axes})"
    if label.extreme:
        over_all = f"jax.lax.{OVER_DEVICES[label.trail[-1].primitive.name]}(x, {axes})"
    return f"is no mean over rows ({named(label.trail)}), {_AVERAGED}. {_ROWS}; or, with microbatches=1, {over_all}"


_AVERAGED = "and aux is averaged over devices and microbatches"
_ROWS = "Return what it is computed from for each row, which comes back whole"


def _of_sum_in_aux(label: Stat, axes: str, by_weight: bool) -> str:
    if label.degree == 1 and not label.guessed:
        cure = f"Return a mean; or, with microbatches=1, jax.lax.psum(x, {axes})"
        return f"is a sum over rows ({named(label.trail)}), {_AVERAGED}. {cure}"
    if by_weight:
        return f"is a mean over rows ({named(label.trail)}), and aux is averaged by the weights of devices. {_ROWS}"
    return ""


def of_devices(trail: Trail) -> str:
    """The message for a mean that was summed over devices."""
    return (
        f"{named(trail)} sums over all devices what is a mean on each, so that it is too large by their number. Return "
        f"the mean of this device's rows, or take jax.lax.pmean for jax.lax.psum. {INTENDED}"
    )


def of_outputs() -> str:
    """The message for per-row outputs that depend on the number of rows."""
    return (
        "its outputs are other ones where there are more rows, and each device has fewer. Divide by nothing that is "
        f"made from their number. {INTENDED}"
    )


def of_rule(rule: Trail) -> str:
    """The message for a gradient from a user's own rule."""
    return f"its gradient is what the rule of {named(rule)} makes of it, which is not looked into"


def of_parts(trail: Trail) -> str:
    """The message for rows that are split into a fixed number of groups."""
    return (
        f"{named(trail)} computes with groups of rows whose size depends on the number of rows; on several devices the "
        f"groups are others. Make groups of a fixed size. {INTENDED}"
    )


def of_sum(loss: Label, weight: Label, weighted: bool) -> str:
    """The message for a loss that grows with its rows in the wrong way."""
    here = f" ({named(loss.trail)})" if isinstance(loss, Stat) else ""
    if NO_POWER in (getattr(loss, "degree", 0), getattr(weight, "degree", 0)):
        cure = "Multiply terms without rows (an L2 penalty) by the weight" if weighted else "Return the mean over rows"
        return (
            f"some of its terms grow with the number of its rows, or shrink with it, and others do not{here}, and each "
            f"device has fewer rows. {cure}; divide nothing else by their number. {INTENDED}"
        )
    if weighted:
        return (
            f"weighted=True needs (a sum over rows, the sum of their weights), and when rows are added, only one of "
            f"the two grows{here}. Return both as sums. {INTENDED}"
        )
    if isinstance(loss, Stat) and loss.degree == 1:
        return (
            f"it is a sum over rows{here}, or is divided by another number than that of its rows, and the losses of "
            "all devices are averaged. Return the mean; or (sum, number of rows) with weighted=True. " + INTENDED
        )
    return (
        f"it changes when all rows are repeated{here}, and the losses of all devices are averaged. Return the mean. "
        + INTENDED
    )
