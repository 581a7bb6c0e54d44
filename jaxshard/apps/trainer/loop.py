"""The training loop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxshard import Metrics, NonFiniteError
from jaxshard.apps.config import memory
from jaxshard.apps.config.memory import least_seconds
from jaxshard.apps.data.token_file import TextError
from jaxshard.apps.records.display import Display, bits
from jaxshard.apps.records.profile import Profile
from jaxshard.apps.records.record import Recorder
from jaxshard.apps.runs.snapshot import Snapshot
from jaxshard.apps.trainer.build import Run, num_updates
from jaxshard.system.users_code import UsersError

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Hooks:
    """The functions that the loop calls.

    Attributes:
      step: the compiled training step.
      evaluate: parameters to the held-out loss, in nats.
      save: saves a snapshot, with its loss after an evaluation.
      save_alone: saves the last snapshot if the text can no longer be read.
      checked: checks that a snapshot's copies agree, and returns it; called every `train.check_every` steps.
      ended: whether to end the run before this step.
      alive: called before each step.
      back: after a divergence: (last snapshot, reason, whether its params are finite) -> the snapshot to go on from, or
        None to end the run.
      profile: traces some of the steps.
    """

    step: Callable[..., tuple[Tree, Tree, Metrics]]
    evaluate: Callable[[Tree], float]
    save: Callable[[Snapshot, float | None], None]
    save_alone: Callable[[Snapshot], None]
    checked: Callable[[Snapshot], Snapshot]
    ended: Callable[[int], bool]
    alive: Callable[[], None]
    back: Callable[[Snapshot, str, bool], Snapshot | None]
    profile: Profile


class Meter:
    """Metrics between two records. Each step's are fetched after the next step is dispatched, so devices never wait.

    Args:
      run: the run.
      recorder: writes the metrics to files.
      display: shows them.
      first: the snapshot that the run starts from.

    Attributes:
      skipped: steps of the whole run that were skipped, because loss or gradient was not finite.
      owes_save: whether a save was due while steps were being skipped.
      skipping: whether the last fetched step was skipped.
    """

    def __init__(self, run: Run, recorder: Recorder, display: Display, first: Snapshot):
        self._run, self._recorder, self._display = run, recorder, display
        self.skipped = first.step - num_updates(first.state)
        self.owes_save = self.skipping = False
        mesh = run.mesh
        self._local_devices = mesh.local_devices
        self._least_seconds = least_seconds(run.config, mesh.devices.flat)
        self._pending: tuple[int, Metrics] | None = None
        self._learning_rate: ArrayLike = 0.0  # of the pending step, if it will be recorded
        self._losses: list[float] = []  # of the steps that were not skipped
        self._grad_norm = 0.0  # of the last of these
        self._num_steps = 0
        self._clock = time.perf_counter()
        self._seconds = 0.0

    def dispatched(self, step: int, metrics: Metrics) -> None:
        """Takes the pending metrics of the step just dispatched; fetches those of the step before."""
        self.fetch()
        self._pending = step, metrics
        if self._is_recorded(step):  # computed after this step, before the next is dispatched
            self._learning_rate = self._run.schedule(step - 1 - self.skipped)

    def fetch(self) -> None:
        """Waits for the pending metrics, and records them if a record is due."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        self.skipping = bool(metrics["skipped"])
        if self.skipping:
            self.skipped += 1
        else:
            self._losses.append(float(metrics["loss"]))
            self._grad_norm = float(metrics["grad_norm"])
        now = time.perf_counter()
        self._seconds, self._clock = self._seconds + now - self._clock, now
        self._num_steps += 1
        self._display.advance(step)
        if self._is_recorded(step):
            self._record(step, {"loss_scale": float(metrics["loss_scale"])} if "loss_scale" in metrics else {})

    def _is_recorded(self, step: int) -> bool:
        return step % self._run.config.train.log_every == 0

    def restart_clock(self) -> None:
        """Excludes the time since the last fetch (of an evaluation or a save) from the steps' time."""
        self._clock = time.perf_counter()

    def go_back(self, snapshot: Snapshot) -> None:
        """Drops everything after `snapshot`."""
        self._recorder.rewind(snapshot.step)
        self.skipped = snapshot.step - num_updates(snapshot.state)
        self._pending, self._losses, self._num_steps, self._seconds = None, [], 0, 0.0
        self.owes_save = self.skipping = False
        self.restart_clock()

    def heldout(self, step: int, loss: float) -> None:
        """Records an evaluation; one that is not finite is only shown."""
        scalars = {"heldout_loss": loss}
        scalars |= {"heldout_bits_per_byte": bits(loss)} if self._run.text.is_bytes else {}
        scalars = rounded(scalars)
        if math.isfinite(loss):
            self._recorder.write(step, scalars)
        self._display.heldout(step, scalars)

    def _record(self, step: int, further: dict[str, float]) -> None:
        """Records the steps since the last record; without a loss, if all were skipped."""
        config, seconds, scalars = self._run.config, self._seconds / self._num_steps, {}
        if self._losses:
            loss = sum(self._losses) / len(self._losses)
            scalars = {"loss": loss, "grad_norm": self._grad_norm}
            scalars |= {"bits_per_byte": bits(loss)} if self._run.text.is_bytes else {}
        scalars |= {
            "learning_rate": float(np.asarray(self._learning_rate)),
            "step_seconds": seconds,
            "tokens_per_second": config.train.rows * config.model.sequence_length / seconds,
            "skipped_steps": self.skipped,
            **self._use_of_devices(seconds),
            **further,
        }
        scalars = rounded(scalars)
        self._recorder.write(step, scalars)
        self._display.training(step, scalars)
        self._losses, self._num_steps, self._seconds = [], 0, 0.0

    def _use_of_devices(self, seconds: float) -> dict[str, float]:
        """MFU and peak memory, if known; does not wait for a device."""
        peak = memory.peak_bytes(self._local_devices)
        found = {} if self._least_seconds is None else {"mfu": self._least_seconds / seconds}
        return found if peak is None else found | {"peak_memory_bytes": peak}


def rounded(scalars: Mapping[str, float]) -> dict[str, float]:
    """Metrics without digits that mean nothing: times and speeds to 4 significant digits, other floats to 7.

    >>> rounded({"loss": 4.728665828704834, "step_seconds": 2.37813108, "skipped_steps": 12_345_678})
    {'loss': 4.728666, 'step_seconds': 2.378, 'skipped_steps': 12345678}
    """
    return {
        name: float(f"{value:.{4 if name in _MEASURED else 7}g}") if isinstance(value, float) else value
        for name, value in scalars.items()
    }


_MEASURED = ("step_seconds", "tokens_per_second", "mfu")


def _divergence(step: int, error: NonFiniteError, max_skips: int) -> str:
    if error.broken:
        return f"step {step}: {error.broken} was already not finite before this step, so no other batch can help"
    return (
        f"step {step}: {error.what} is not finite, and more than train.max_skips = {max_skips} steps in a row were "
        "skipped: lower optimizer.learning_rate, or warm up longer"
    )


def fit(run: Run, snapshot: Snapshot, hooks: Hooks, meter: Meter) -> Snapshot:
    """Trains from `snapshot` to the last step, early stopping or an interruption; returns the snapshot there.

    Raises:
      FloatingPointError: too many steps in a row were skipped; the state before them is saved.
      TextError, UsersError: a batch cannot be read; the state so far is saved.
    """
    train = run.config.train
    meter.restart_clock()
    while snapshot.step < train.steps and not snapshot.stopping.stopped and not hooks.ended(snapshot.step):
        hooks.alive()
        keys = run.keys(snapshot.step)
        try:
            batch = run.batch(snapshot.position.drawn)
        except (TextError, UsersError):
            meter.fetch()
            hooks.save_alone(snapshot)
            raise
        hooks.profile.before((snapshot.params, snapshot.state, batch))
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=snapshot.step):
                params, state, metrics = hooks.step(snapshot.params, snapshot.state, batch, *keys)
        except NonFiniteError as error:
            meter.fetch()
            why = _divergence(snapshot.step - 1, error, train.max_skips)
            back = hooks.back(snapshot, why, error.broken is None)
            if back is None:
                raise FloatingPointError(why) from error
            snapshot = back
            meter.go_back(snapshot)
            continue
        hooks.profile.after((params, state))
        position = dataclasses.replace(snapshot.position, drawn=snapshot.position.drawn + 1)
        snapshot = dataclasses.replace(snapshot, params=params, state=state, step=snapshot.step + 1, position=position)
        meter.dispatched(snapshot.step, metrics)
        snapshot = _between(run, snapshot, hooks, meter)
    meter.fetch()
    return snapshot


def _between(run: Run, snapshot: Snapshot, hooks: Hooks, meter: Meter) -> Snapshot:
    """Checks, evaluates and saves, if due after a step.

    Nothing is saved while steps are being skipped: bad params may be the cause, and would replace a good save.
    """
    train, loss = run.config.train, None
    meter.owes_save |= bool(train.save_every) and snapshot.step % train.save_every == 0
    checks = bool(train.check_every) and snapshot.step % train.check_every == 0
    if checks or (meter.owes_save and train.mend_copies):
        meter.fetch()
        snapshot = hooks.checked(snapshot)
        meter.restart_clock()
    if snapshot.step % train.eval_every == 0 or snapshot.step == train.steps:
        meter.fetch()
        loss = hooks.evaluate(snapshot.params)
        meter.heldout(snapshot.step, loss)
        snapshot = dataclasses.replace(snapshot, stopping=snapshot.stopping.after(loss))
        meter.restart_clock()
    if meter.owes_save:
        meter.fetch()
        if not meter.skipping:
            hooks.save(snapshot, loss)
            meter.owes_save = False
        meter.restart_clock()
    return snapshot
