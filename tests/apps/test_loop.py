"""What the loop measures: figures that are known, none that is made up, and none that devices wait for."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxshard
from jaxshard.apps.config import memory
from jaxshard.apps.config.config import Config, ModelConfig, TrainConfig
from jaxshard.apps.config.memory import least_seconds, useful_flops
from jaxshard.apps.runs.snapshot import Snapshot
from jaxshard.apps.trainer.loop import Meter, _divergence
from jaxshard.apps.trainer.safekeeping import _way_back
from jaxshard.hardware.chips import CHIPS, chip_of

CONFIG = Config(train=TrainConfig(log_every=2), model=ModelConfig(dtype="bfloat16"))


class Device(SimpleNamespace):
    """A device of an accelerator that is not here."""

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


class Written(list):
    """A recorder, or a display, that keeps what it is given."""

    def write(self, step, scalars):
        self.append((step, dict(scalars)))

    training = heldout = write

    def advance(self, step):
        pass

    def rewind(self, step):
        pass


def a_meter(schedule=lambda step: 0.1 * step, config=CONFIG):
    """A meter of a run of no model, and what it wrote."""
    run = SimpleNamespace(config=config, schedule=schedule, text=SimpleNamespace(is_bytes=True))
    run.mesh = jaxshard.make_mesh()
    written = Written()
    return Meter(run, written, Written(), Snapshot({}, {"count": 0}, 0, None, None)), written


def metrics(loss=2.0, skipped=False):
    return {"loss": np.float32(loss), "grad_norm": np.float32(0.5), "skipped": np.bool_(skipped)}


def test_names_that_jax_gives_devices_are_known_by_whole_boards():
    kinds = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA A100-SXM4-40GB",
        "TPU v4",
        "TPU v5",
        "TPU v5p",
        "TPU v6 lite",
    ]
    assert [chip_of(kind).name for kind in kinds] == ["h100", "h200", "a100", "v4", "v5p", "v5p", "v6e"]
    others = [
        "cpu",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 PCIe",
        "NVIDIA GH200 480GB",
        "TPU v4 lite",
        "TPU v7x",
    ]
    assert [chip_of(kind) for kind in others] == [None] * len(others)


def test_utilization_is_useful_work_over_the_peak_of_all_devices():
    h100, cpu = (SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H100 80GB HBM3", "cpu"))
    assert least_seconds(CONFIG, [h100] * 4) == pytest.approx(useful_flops(CONFIG) / (4 * 989.5e12))
    single = dataclasses.replace(CONFIG, model=ModelConfig(dtype="float32"))
    assert least_seconds(single, [h100]) == useful_flops(single) / CHIPS["h100"].flops["float32"]
    assert least_seconds(CONFIG, [h100, cpu]) is None


def test_the_peak_of_memory_is_the_fullest_devices_where_the_backend_tells_it():
    full, empty = Device(stats={"peak_bytes_in_use": 7}), Device(stats={"peak_bytes_in_use": 3})
    silent = [Device(stats=None), Device(stats={}), Device(stats=NotImplementedError())]
    silent += [Device(stats=jax.errors.JaxRuntimeError("UNIMPLEMENTED: no statistics"))]
    assert memory.peak_bytes([empty, full, *silent]) == 7
    assert memory.peak_bytes(silent) is None
    assert memory.peak_bytes(jax.devices()) is None  # simulated ones share the host's memory


def test_a_record_has_the_use_of_devices_where_it_is_known_alone(monkeypatch):
    meter, written = a_meter()
    for step in (1, 2, 3):
        meter.dispatched(step, metrics())
    meter._least_seconds, meter._local_devices = 1e-9, [Device(stats={"peak_bytes_in_use": 5})]
    for step in (4, 5):
        meter.dispatched(step, metrics())
    (_, first), (_, second) = written
    assert {"mfu", "peak_memory_bytes"}.isdisjoint(first)
    assert second["mfu"] == pytest.approx(1e-9 / second["step_seconds"], rel=2e-3)
    assert second["peak_memory_bytes"] == 5


def test_nothing_of_a_step_is_read_before_the_next_is_dispatched():
    """The learning rate was computed on a device behind the next step, and read at once: devices waited."""
    events = []

    class Seen:
        def __init__(self, name):
            self.name = name

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.name}")
            return np.asarray(0.5)

        def __float__(self):
            return float(np.asarray(self))

        def __bool__(self):
            events.append(f"read {self.name}")
            return False

    def schedule(count):
        events.append(f"rate {count}")
        return Seen(f"rate {count}")

    meter, written = a_meter(schedule)
    for step in (1, 2, 3, 4):
        events.append(f"dispatch {step}")
        meter.dispatched(step, {name: Seen(step) for name in ("loss", "grad_norm", "skipped")})
    read = ["read {}"] * 3
    assert events[:5] == ["dispatch 1", "dispatch 2", *(each.format(1) for each in read)]
    assert events[5:] == [
        *("rate 1", "dispatch 3", *(each.format(2) for each in read), "read rate 1"),
        *("dispatch 4", *(each.format(3) for each in read), "rate 3"),
    ]
    assert written[0][1]["learning_rate"] == 0.5


def test_the_learning_rate_waits_for_steps_that_were_skipped():
    meter, written = a_meter()
    for step, skipped in enumerate([True, True, False, True, False, False, False], 1):
        meter.dispatched(step, metrics(skipped=skipped))
    assert [scalars["learning_rate"] for _, scalars in written] == pytest.approx([0.0, 0.1, 0.2])
    assert [scalars["skipped_steps"] for _, scalars in written] == [2, 3, 3]
    assert "loss" not in written[0][1]


def test_a_divergence_says_whether_the_params_were_finite_before():
    """Of params that are NaN it was said that they are as the last good step left them."""
    error = SimpleNamespace(what="the update of w", broken=None)
    assert "step 7: the update of w is not finite, and more than train.max_skips = 3" in _divergence(7, error, 3)
    error.broken = "blocks/w"
    assert "step 7: blocks/w was already not finite before this step" in _divergence(7, error, 3)
    assert _way_back([10, 20, 30], 10) == (
        "the newest finite save is step 10: move 20, 30 out of model/, and resume with --resume"
    )
    assert _way_back([10], 10) == "the newest finite save is step 10: resume with --resume"
    assert _way_back([10], None) == "no save is recorded as finite: start a new run"
