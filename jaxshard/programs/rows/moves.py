"""Labels of the results of operations that move elements, mix those along some dims, or draw random numbers."""

import math
from collections.abc import Iterable, Sequence

from jaxshard.programs.primitives import DRAWS, MOVES, SEVERAL, TOP_K, is_linear_in_last, mixed_dims
from jaxshard.programs.rows.arithmetic import Pair
from jaxshard.programs.rows.labels import ANY, SAME, Label, all_plain, joined, lie_apart, near, shifted


def iota(pair: Pair, _: Sequence[Label]) -> Label:
    grown = pair.grown()
    if not grown:
        return SAME
    if len(grown) > 1:
        return pair.no("pairs")
    own = grown[0] == pair.one.params["dimension"]
    return Label("rows", dim=grown[0], place=own, fixed=not own, outer=1 if own else ANY)


def broadcast(pair: Pair, labels: Sequence[Label]) -> Label:
    (label, *_), grown, dims = labels, pair.grown(), pair.one.params["broadcast_dimensions"]
    if label.kind == "rows":
        new = dims[label.dim]
        return label.with_(dim=new) if grown in ([], [new]) else pair.no("pairs")
    if not grown:
        return label
    if label.kind == "total":
        return pair.no("statistic", label.trail)
    if len(grown) > 1:
        return pair.no("pairs")
    return label.with_(kind="rows", dim=grown[0], outer=ANY, fixed=True)


def reshape(pair: Pair, labels: Sequence[Label]) -> Label:
    """Rows come after `outer` elements of the dims before them, and still do."""
    (label, *_), grown, (old, _) = labels, pair.grown(), pair.shapes(0)
    if label.kind != "rows":
        return pair.no("statistic", label.trail) if grown else label
    if len(grown) != 1 or (pair.one.params.get("dimensions") is not None and pair.name == "reshape"):
        return pair.no("unknown")
    (dim,), new = grown, pair.out_shapes()[0]
    before, now = math.prod(old[: label.dim]) * max(label.outer, 1), math.prod(new[:dim])
    if old[label.dim] == new[dim] and math.prod(old[: label.dim]) == now:
        return label.with_(dim=dim)
    if before % now or new[dim] % (before // now) or label.place:
        return pair.no("unknown")
    return label.with_(dim=dim, outer=before // now)


def transpose(pair: Pair, labels: Sequence[Label]) -> Label:
    (label,) = labels
    return label.with_(dim=pair.one.params["permutation"].index(label.dim)) if label.kind == "rows" else label


def rev(pair: Pair, labels: Sequence[Label]) -> Label:
    (label,) = labels
    inside = label.kind == "rows" and label.dim in pair.one.params["dimensions"]
    return (pair.no("position") if label.place else pair.no("some")) if inside and label.outer != ANY else label


def slice_(pair: Pair, labels: Sequence[Label]) -> Label:
    (label,) = labels
    cuts = [
        [*zip(eqn.params["start_indices"], eqn.params["limit_indices"], eqn.params["strides"] or shape, strict=True)]
        for eqn, shape in zip((pair.one, pair.two), ((1,) * len(s) for s in pair.shapes(0)), strict=True)
    ]
    if label.kind != "rows":
        return label if cuts[0] == cuts[1] else pair.no("position" if label.kind == "same" else "statistic", ())
    rest = [[cut for d, cut in enumerate(each) if d != label.dim] for each in cuts]
    return _sliced(pair, label, *(each[label.dim] for each in cuts)) if rest[0] == rest[1] else pair.no("position")


def _sliced(pair: Pair, label: Label, *cuts: tuple[int, int, int]) -> Label:
    """The label of a slice (start, limit, step) of rows in each of the two programs."""
    sizes = [shape[label.dim] for shape in pair.shapes(0)]
    counts = [-(-(limit - start) // step) for start, limit, step in cuts]
    (start, limit, step), (start_of_all, _, step_of_all) = cuts
    if label.place and (start, counts[0]) != (0, sizes[0]):
        return pair.no("position")
    if label.outer == ANY and counts[0] * pair.parts == counts[1]:
        return label
    blocks = [size // max(label.outer, 1) for size in sizes]
    if step == step_of_all == 1:  # whole copies of the batch
        ends = [[*map(divmod, (a, b), (block, block))] for (a, b, _), block in zip(cuts, blocks, strict=True)]
        if ends[0] == ends[1] and not any(rest for _, rest in ends[0]):
            return label.with_(outer=(limit - start) // blocks[0])
    evenly = step == step_of_all and start == start_of_all < step and not blocks[0] % step
    if evenly and all(count * step == size for count, size in zip(counts, sizes, strict=True)):
        return label  # one of each group of neighbours
    return pair.no("some")


def split(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    (label,), axis, start, found = labels, pair.one.params["axis"], [0, 0], list[Label]()
    for sizes in zip(pair.one.params["sizes"], pair.two.params["sizes"], strict=True):
        cuts = [(a, a + size, 1) for a, size in zip(start, sizes, strict=True)]
        start = [end for _, end, _ in cuts]
        if label.kind == "rows" and label.dim == axis:
            found.append(_sliced(pair, label, *cuts))
        else:
            found.append(label if cuts[0] == cuts[1] else pair.no("position"))
    return found


def concatenate(pair: Pair, labels: Sequence[Label]) -> Label:
    dim, shapes = pair.one.params["dimension"], [v.aval.shape for v in pair.one.invars]
    columns = tuple(x for x, shape in zip(labels, shapes, strict=True) for _ in range(shape[dim]))
    if any(x.place for x in labels):
        last = dim == len(shapes[0]) - 1 and not any(x.kind == "rows" and x.dim == dim for x in labels)
        return pair.no("position") if not last else _with_columns(pair, columns)
    found = joined(labels, pair.parts)
    if found is None:
        totals = [x for x in labels if x.kind == "total"]
        return pair.no(
            "count" if len({x.kind for x in labels}) == 1 else "statistic", totals[0].trail if totals else ()
        )
    if found.kind != "rows" or found.dim != dim:
        return found.with_(value=None)
    outers = [max(x.outer, 1) for x in labels]
    blocks = {shape[dim] // outer for shape, outer in zip(shapes, outers, strict=True)}
    if len(blocks) == 1 and len(labels) > 1:
        return found.with_(outer=sum(outers), value=None)
    return found if len(labels) == 1 else pair.no("unknown")


def _with_columns(pair: Pair, columns: tuple[Label, ...]) -> Label:
    """The label of indices of which a column is each row's place: nothing but an index."""
    return pair.no("position").with_(columns=columns)


def stack(pair: Pair, labels: Sequence[Label]) -> Label:
    new, found = pair.one.params["axis"], joined(labels, pair.parts)
    if found is None:
        return pair.no("statistic")
    return found.with_(dim=found.dim + (found.dim >= new), value=None) if found.kind == "rows" else found


def unstack(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    (label,), old = labels, pair.one.params["axis"]
    found = pair.no("some") if label.kind == "rows" and label.dim == old else shifted(label, [old])
    return [found] * len(pair.one.outvars)


def tile(pair: Pair, labels: Sequence[Label]) -> Label:
    """Repeats the whole array along each dim."""
    (label,), times = labels, pair.one.params["reps"]
    if pair.two.params["reps"] != times:
        return pair.no("pairs" if label.kind == "rows" else "statistic")
    if label.kind != "rows" or times[label.dim] == 1 or label.outer == ANY:
        return label
    return pair.no("position") if label.place else label.with_(outer=label.outer * times[label.dim])


def pad(pair: Pair, labels: Sequence[Label]) -> Label:
    label, filling = labels
    if label.kind == "rows":
        if any(pair.one.params["padding_config"][label.dim]) or filling.kind != "same":
            return pair.no("unknown")
        return label.with_(value=None) if near(label.ratio, filling.ratio) else pair.no("count")
    found = joined(labels, pair.parts)
    return found.with_(value=None) if found else pair.no("statistic", label.trail)


def dynamic_slice(pair: Pair, labels: Sequence[Label]) -> Label:
    label, *starts = labels
    sizes, (one, two) = pair.one.params["slice_sizes"], pair.shapes(0)
    if any(x.kind != "same" for x in starts) or not all_plain(starts):
        return pair.no("unknown")
    if label.kind == "rows":
        whole = sizes[label.dim] == one[label.dim] and pair.two.params["slice_sizes"][label.dim] == two[label.dim]
        return label if whole else pair.no("some")
    return label if tuple(sizes) == tuple(pair.two.params["slice_sizes"]) else pair.no("position")


def dynamic_update_slice(pair: Pair, labels: Sequence[Label]) -> Label:
    into, part, *starts = labels
    if any(x.kind != "same" for x in starts) or not all_plain(starts):
        return pair.no("unknown")
    found = joined([into, part], pair.parts)
    if found is None:
        return pair.no("statistic")
    if found.kind == "rows" and any(
        x[found.dim] != y[found.dim] for x, y in zip(pair.shapes(0), pair.shapes(1), strict=True)
    ):
        return pair.no("unknown")
    return found.with_(value=None)


def along(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    """A sort or a cumulative sum: each element depends on all elements that share its other indices."""
    ndim = len(pair.shapes(0)[0])
    dim = next((pair.one.params[key] for key in ("axis", "dimension") if key in pair.one.params), -1) % max(ndim, 1)
    found = _mixing(pair, labels, [dim])
    plain = [x if x.kind == "other" else x.with_(ratio=1.0) for x in found]
    return [*found[:1], *plain[1:]] if pair.name == TOP_K else found  # then come indices, which do not scale


def leading(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    """Linear algebra or a Fourier transform: it mixes the last dims, and none before."""
    ndim = len(pair.shapes(0)[0])
    return _mixing(pair, labels, range(ndim - mixed_dims(pair.one), ndim))


def window(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    """Pooling."""
    params = pair.one.params
    whole = [("window_dimensions", 1), ("window_strides", 1), ("base_dilation", 1), ("padding", (0, 0))]
    cut = {d for key, one in whole for d, x in enumerate(params.get(key) or ()) if x != one}
    return _mixing(pair, labels, cut)


def _mixing(pair: Pair, labels: Sequence[Label], dims: Iterable[int]) -> list[Label]:
    """The labels of results that depend on all elements along some dims, and are apart along the others."""
    mixed, count = {*dims}, len(pair.one.outvars)
    rows = [x for x in labels if x.kind == "rows"]
    if total := next((x for x in labels if x.kind == "total"), None):
        return [
            total if pair.is_linear and total.by == "sum" and len(labels) == 1 else pair.no("statistic", total.trail)
        ] * count
    if any(x.place for x in rows):
        return [pair.no("position")] * count
    linear = _linear(pair, labels)
    if not all_plain(labels[: len(labels) - len(linear)]) or not all(near(x.ratio, linear[0].ratio) for x in linear):
        return [pair.no("count")] * count
    own = any(x.own for x in labels)
    ratio = linear[0].ratio if linear else 1.0
    if not rows:
        return [Label("same", ratio, own=own)] * count
    if any(x.dim in mixed for x in rows):
        fixed = all(x.fixed for x in rows)
        return [pair.no("position") if fixed else pair.no("statistic", pair.trail)] * count
    if lie_apart(rows):
        return [pair.no("pairs")] * count
    outer, fixed = max(x.outer for x in rows), all(x.fixed for x in labels if x.kind == "rows")
    return [Label("rows", ratio, rows[0].dim, outer, fixed=fixed, own=own)] * count


def _linear(pair: Pair, labels: Sequence[Label]) -> Sequence[Label]:
    """The last of an operation's operands, in which it is linear together."""
    if pair.is_linear or (pair.name in MOVES and len(labels) == 1):
        return labels
    return labels[-1:] if is_linear_in_last(pair.one) else ()


def triangular_solve(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    """Each right-hand side is solved by itself: a column of the right matrix, or a row if that comes first."""
    matrix, right = labels
    if matrix.kind == "same" and near(matrix.ratio, 1.0) and right.kind == "total" and right.by == "sum":
        return [right.with_(value=None)]
    if matrix.kind != "same" or right.kind != "rows" or not near(matrix.ratio, 1.0):
        return leading(pair, labels)
    ndim = len(pair.shapes(1)[0])
    solved = ndim - (2 if pair.one.params["left_side"] else 1)
    return [pair.no("statistic", pair.trail) if right.dim == solved else right.with_(value=None)]


def random(pair: Pair, labels: Sequence[Label]) -> Label:
    """Random keys and numbers: for each key, they lie in dims after the keys' own."""
    found, grown = joined(labels, pair.parts) if len({x.kind for x in labels}) == 1 else None, pair.grown()
    if any(x.kind == "total" for x in labels) or not all_plain(labels):
        return pair.no("unknown")
    rows = [x for x in labels if x.kind == "rows"]
    if rows:
        found = rows[0] if len({(x.dim, x.outer) for x in rows}) == 1 and not rows[0].place else None
        return found.with_(value=None, fixed=all(x.fixed for x in rows)) if found else pair.no("position")
    own = any(x.own for x in labels)
    if not grown:
        return Label("same", own=own)
    if len(grown) > 1 or pair.name not in SEVERAL | DRAWS:
        return pair.no("unknown")
    return Label("rows", dim=grown[0]) if own else pair.no("drawn")


def batched(pair: Pair, labels: Sequence[Label]) -> list[Label]:
    """A kernel that works on each index of the first dim by itself."""
    rows = [x for x in labels if x.kind == "rows"]
    linear = _linear(pair, labels)
    fine = all(x.kind in ("same", "rows") for x in labels) and all_plain(labels[: len(labels) - len(linear)])
    fine = fine and not pair.one.params.get("dropout_rate")  # its numbers are drawn by place
    if not fine or any(x.dim or x.outer > 1 or x.place for x in rows):
        return [pair.no("unknown")] * len(pair.one.outvars)
    ratio = linear[0].ratio if linear else 1.0
    found = Label("rows", ratio) if rows else SAME.with_(ratio=ratio)
    return [found if pair.grown(i) == [0] * bool(rows) else pair.no("unknown") for i in range(len(pair.one.outvars))]
