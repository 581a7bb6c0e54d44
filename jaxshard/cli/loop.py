"""The training loop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxshard.cli.folder import Snapshot
from jaxshard.cli.record import Recorder
from jaxshard.cli.report import Display, bits
from jaxshard.cli.run import Run


@dataclasses.dataclass(frozen=True, eq=False)
class Hooks:
    """What the loop calls: the compiled step and evaluation, the saving, the question whether to stop."""

    step: Callable[..., tuple[Any, Any, dict[str, Any]]]
    evaluate: Callable[[Any], float]
    save: Callable[[Snapshot], None]
    interrupted: Callable[[], bool]


class Meter:
    """Metrics between two records. A step's are fetched once the next step is dispatched, so devices never wait."""

    def __init__(self, run: Run, recorder: Recorder, display: Display):
        self._run, self._recorder, self._display = run, recorder, display
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._losses: list[float] = []
        self._clock = time.perf_counter()
        self._seconds = 0.0

    def dispatched(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the metrics, still being computed, of the step just dispatched; fetches those of the one before."""
        self.fetch()
        self._pending = step, metrics

    def fetch(self) -> None:
        """Waits for the pending metrics, and records them if it is time to."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        if not math.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}: lower optimizer.learning_rate, or warm up longer"
            )
        now = time.perf_counter()
        self._seconds, self._clock = self._seconds + now - self._clock, now
        self._losses.append(loss)
        self._display.advance(step)
        if step % self._run.config.train.log_every == 0:
            self._record(step, grad_norm)

    def restart_clock(self) -> None:
        """What happened since the last fetch (an evaluation, a save) is no part of a step's time."""
        self._clock = time.perf_counter()

    def heldout(self, step: int, loss: float) -> None:
        """Records an evaluation."""
        scalars = {"heldout_loss": loss, "heldout_bits_per_byte": bits(loss)}
        self._recorder.write(step, scalars)
        self._display.heldout(step, scalars)

    def _record(self, step: int, grad_norm: float) -> None:
        config, loss = self._run.config, sum(self._losses) / len(self._losses)
        seconds = self._seconds / len(self._losses)
        scalars = {
            "loss": loss,
            "bits_per_byte": bits(loss),
            "grad_norm": grad_norm,
            "learning_rate": float(np.asarray(self._run.schedule(step - 1))),
            "step_seconds": seconds,
            "tokens_per_second": config.train.rows * config.model.sequence_length / seconds,
        }
        self._recorder.write(step, scalars)
        self._display.training(step, scalars)
        self._losses, self._seconds = [], 0.0


def fit(run: Run, snapshot: Snapshot, hooks: Hooks, meter: Meter) -> Snapshot:
    """Trains from `snapshot` until the last step, early stopping or an interruption; returns where that was."""
    train = run.config.train
    meter.restart_clock()
    while snapshot.step < train.steps and not snapshot.stopping.stopped and not hooks.interrupted():
        batch, keys = run.batch(snapshot.step), run.keys(snapshot.step)
        params, state, metrics = hooks.step(snapshot.params, snapshot.state, batch, *keys)
        snapshot = dataclasses.replace(snapshot, params=params, state=state, step=snapshot.step + 1)
        meter.dispatched(snapshot.step, metrics)
        if snapshot.step % train.eval_every == 0 or snapshot.step == train.steps:
            meter.fetch()
            loss = hooks.evaluate(snapshot.params)
            meter.heldout(snapshot.step, loss)
            snapshot = dataclasses.replace(snapshot, stopping=snapshot.stopping.after(loss))
            meter.restart_clock()
        if train.save_every and snapshot.step % train.save_every == 0:
            meter.fetch()
            hooks.save(snapshot)
            meter.restart_clock()
    meter.fetch()
    return snapshot
