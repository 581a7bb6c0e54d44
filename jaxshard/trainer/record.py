"""A run's metrics as JSON lines, TensorBoard events and a figure."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Self

import tensorboardX

from jaxshard.base.files import replace
from jaxshard.base.text import printable
from jaxshard.trainer.metrics import Record
from jaxshard.trainer.run_folder import RunFolder

_LARGEST = 1e30  # bits per byte that are drawn
_TITLE_CHARACTERS = 90


class Recorder:
    """Appends metrics to a run's `metrics.jsonl`, one object per line, and to its TensorBoard events.

    Args:
      folder: of the run.
      first: the number of steps already taken; TensorBoard drops later steps that an earlier process recorded.
      writes: whether this process writes; only the first one should.
    """

    def __init__(self, folder: RunFolder, first: int, writes: bool):
        self._folder, self._writes = folder, writes
        self._open(first)

    def _open(self, first: int) -> None:
        if self._writes:
            self._lines = self._folder.metrics.open("a", encoding="utf-8")
            self._events = tensorboardX.SummaryWriter(str(self._folder.tensorboard), purge_step=first + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writes:
            self._lines.close()
            self._events.close()

    def rewind(self, step: int) -> None:
        """Drops the records of steps beyond `step`, which will be taken again."""
        self.__exit__()
        if self._writes:
            self._folder.forget_after(step)
        self._open(step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the values of `scalars` after `step` steps."""
        if not self._writes:
            return
        self._lines.write(json.dumps({"step": step, **scalars}, allow_nan=False) + "\n")
        self._lines.flush()
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)


def draw(folder: RunFolder, marks: Mapping[str, float], is_bytes: bool = True) -> None:
    """Draws the curves of loss in `folder.metrics`, and each mark as a level line, to `folder.figure`.

    Args:
      folder: of the run.
      marks: by name.
      is_bytes: bits per byte are drawn, else nats per token.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here it may fail: where MPLBACKEND names none
    from matplotlib.figure import Figure

    records = folder.records()
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    loss = "bits_per_byte" if is_bytes else "loss"
    axes.plot(*_curve(records, loss), color="#9aa5b1", linewidth=1.2, label="training")
    axes.plot(*_curve(records, f"heldout_{loss}"), color="#0b6e99", marker="o", markersize=4, label="held out")
    for name, value in marks.items():
        axes.axhline(value, color="#c2410c", linewidth=1, linestyle="--")
        where = {"xy": (0.99, value), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"{name}: {value:.2f}", **where, color="#c2410c")
    axes.set(xlabel="step", ylabel="bits per byte" if is_bytes else "nats per token")
    axes.set_title(printable(str(folder.path))[-_TITLE_CHARACTERS:], parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font has not every character
        replace(folder.figure, lambda temporary: figure.savefig(temporary, format="png"))


def _curve(records: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if _is_drawable(record.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def _is_drawable(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST
