"""Records a run's metrics as JSON lines, TensorBoard events, a figure, and by other loggers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar
from tensorboardX.summary import text as text_summary

from jaxshard.apps.config.config import Config
from jaxshard.apps.records.trackers import Before, Tracker
from jaxshard.apps.runs.folder_watch import FolderWatch
from jaxshard.apps.runs.metrics import Record
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.system.files import replace, sync_file
from jaxshard.system.small_files import by_own_settings
from jaxshard.system.text import printable

_EVENTS: Any = event_pb2  # made at run time
_LARGEST = 1e30  # bits per byte to draw
_TITLE_CHARACTERS = 90


class Logger(Protocol):
    """A logger of a run's metrics."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the values of `scalars` after `step` steps."""
        ...

    def rewind(self, step: int) -> None:
        """Drops the records of steps after `step`, which will be repeated."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class Lines:
    """Appends metrics to a run's `metrics.jsonl`, one object per line.

    Args:
      folder: of the run. If it is moved, the lines follow it.
      tell: shows the user a line.
    """

    def __init__(self, folder: RunFolder, tell: Callable[[str], None]):
        self._folder, self._tell = folder, tell
        self._watch = FolderWatch(folder.path)
        self._file = self._watch.open(folder.metrics.name)
        self._syncs = ThreadPoolExecutor(1, "jaxshard syncs metrics")
        self._last_sync: Future[None] | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends a line."""
        if not self._watch.has(self._folder.metrics.name, self._file):
            self._reopen()
            self._tell(_begun_anew(self._folder.metrics, step))
        self._file.write(json.dumps({"step": step, **scalars}, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._last_sync is not None and self._last_sync.done():
            self._synced()

    def sync(self) -> None:
        """Starts a thread that syncs all lines to disk; a later call raises its error."""
        self._synced()
        self._last_sync = self._syncs.submit(sync_file, self._file)

    def _synced(self) -> None:
        last, self._last_sync = self._last_sync, None
        if last is not None:
            last.result()

    def _reopen(self) -> None:
        self._close()
        self._file = self._watch.open(self._folder.metrics.name)

    def rewind(self, step: int) -> None:
        """Drops lines from the file."""
        self._close()
        self._folder.forget_after(step)
        self._file = self._watch.open(self._folder.metrics.name)

    def close(self) -> None:
        """Syncs and closes the file."""
        self._close()
        self._syncs.shutdown()
        self._watch.close()

    def _close(self) -> None:
        with self._file:
            self._synced()
            sync_file(self._file)


class TensorBoard:
    """Appends metrics to a run's TensorBoard events.

    Args:
      folder: of the run.
      first: the number of steps already taken. TensorBoard then drops earlier events of later steps.
      tell: shows the user a line.
    """

    def __init__(self, folder: RunFolder, first: int, tell: Callable[[str], None]):
        self._folder, self._tell, self._number = folder, tell, 0
        self._watch = FolderWatch(folder.path)
        self._open(first)

    def _open(self, first: int) -> None:
        """Starts a file; tensorboardX would overwrite one from the same second."""
        self._suffix, self._number = f".{os.getpid()}.{self._number:04}", self._number + 1
        if self._folder.tensorboard.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(self._folder.tensorboard))
        self._folder.tensorboard.mkdir(exist_ok=True)
        self._events = EventsWriter(str(self._folder.tensorboard / "events"), self._suffix)
        self._add(_EVENTS.Event(step=first + 1, session_log={"status": _EVENTS.SessionLog.START}))

    def _add(self, event: Any) -> None:
        """Writes an event at once. (tensorboardX's SummaryWriter has a thread for it, which ends at the first error, as
        on a full disk; then its queue fills up, and the run blocks forever.)"""
        event.wall_time = time.time()
        self._events.write_event(event)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends an event for each value."""
        self._reopen_if_gone(step)
        for name, value in scalars.items():
            self._add(_EVENTS.Event(step=step, summary=scalar(tag_of(name), value)))
        self._events.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Appends an event with a text, which is shown as it is."""
        self._reopen_if_gone(step)
        self._add(_EVENTS.Event(step=step, summary=text_summary(name, "    " + text.replace("\n", "\n    "))))
        self._events.flush()

    def _reopen_if_gone(self, step: int) -> None:
        is_there = any(self._folder.tensorboard.glob(f"*{self._suffix}"))
        if not is_there and self._watch.where() == self._folder.path:  # otherwise the file has moved with the folder
            self.rewind(step - 1)
            self._tell(_begun_anew(self._folder.tensorboard, step))

    def rewind(self, step: int) -> None:
        """Starts a new file, which overrides later steps."""
        self._events.close()
        self._open(step)

    def close(self) -> None:
        """Closes the file."""
        self._events.close()
        self._watch.close()


def tag_of(name: str) -> str:
    """TensorBoard's tag of a metric, in one of three groups.

    >>> tag_of("loss"), tag_of("heldout_loss"), tag_of("mfu")
    ('train/loss', 'heldout/loss', 'speed/mfu')
    """
    if name.startswith("heldout_"):
        return f"heldout/{name.removeprefix('heldout_')}"
    return f"{'speed' if name in _OF_SPEED else 'train'}/{name}"


_OF_SPEED = ("step_seconds", "tokens_per_second", "mfu", "peak_memory_bytes")


def _begun_anew(path: Path, step: int) -> str:
    return printable(f"{path} was moved, deleted or replaced: a new file begins at step {step}")


def loggers(
    folder: RunFolder, config: Config, found: Before, tell: Callable[[str], None]
) -> dict[str, Callable[[], Logger]]:
    """logger's name -> its factory; `metrics.jsonl` comes first, since trackers read it."""
    made: dict[str, Callable[[], Logger]] = {folder.metrics.name: lambda: Lines(folder, tell)}
    for name in config.train.log_to:
        if name == "tensorboard":
            made[name] = lambda: TensorBoard(folder, found.first, tell)
        else:
            made[name] = lambda name=name: Tracker(name, folder, config, found)
    return made


class Recorder:
    """Writes a run's metrics to its loggers. A logger that fails is reported once and retried; it never stops the run.

    Args:
      makers: logger's name -> its factory; empty except in process 0.
      tell: shows the user a line.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Logger]], tell: Callable[[str], None]):
        self._tell, self._reported = tell, set[str]()
        self._loggers: dict[str, Logger] = {}
        for name, make in makers.items():
            with self._kept_going(name):
                self._loggers[name] = make()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda logger: logger.close())

    def rewind(self, step: int) -> None:
        """Drops the records of steps after `step`, which will be repeated."""
        self._each(lambda logger: logger.rewind(step))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the values of `scalars` after `step` steps."""
        self._each(lambda logger: logger.write(step, scalars))

    def text(self, step: int, name: str, text: str) -> None:
        """Records a text after `step` steps, in TensorBoard."""
        self._each(lambda logger: logger.text(step, name, text) if isinstance(logger, TensorBoard) else None)

    def sync(self) -> None:
        """Starts to sync the lines of metrics to disk, as at each save; nothing waits for it."""
        self._each(lambda logger: logger.sync() if isinstance(logger, Lines) else None)

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in self._loggers.items():
            with self._kept_going(name):
                act(logger)

    @contextlib.contextmanager
    def _kept_going(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any type, by package
            if name not in self._reported:
                self._reported.add(name)
                reason = f"{type(error).__name__}: {error}"
                self._tell(printable(f"{name} lacks metrics from here on ({reason[:300]}); the run goes on"))


@by_own_settings
def draw(folder: RunFolder, marks: Mapping[str, float], is_bytes: bool = True) -> None:
    """Draws the loss curves of `folder.metrics`, and each mark as a horizontal line, to `folder.figure`.

    Args:
      folder: of the run.
      marks: by name.
      is_bytes: draw bits per byte, else nats per token.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here, as it fails for an unknown MPLBACKEND
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
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks some characters
        replace(folder.figure, lambda file: figure.savefig(file, format="png"))


def _curve(records: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if _is_drawable(record.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def _is_drawable(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST
