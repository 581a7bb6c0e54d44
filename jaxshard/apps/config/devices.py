"""A run's devices: of this process or of several, simulated if there is no accelerator."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax
from jax.sharding import Mesh

import jaxshard
from jaxshard.apps.config.config import Config, ShardingConfig

_SIMULATED_DEVICES = 8
MOST_SIMULATED = 4096  # more take minutes to start


def start_devices(config: Config) -> None:
    """Joins this process to the others of a run, and simulates devices if there is no accelerator.

    Raises:
      ValueError: JAX finds no devices.
    """
    simulate_cpus(config.sharding.devices)
    _join_processes(config.train.heartbeat_seconds)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms, why = os.environ.get("JAX_PLATFORMS", ""), str(error)[:300] or "this platform does not exist"
        raise ValueError(f"JAX found no devices with JAX_PLATFORMS={platforms!r}: {why}") from error


def make_mesh(sharding: ShardingConfig) -> Mesh:
    """The mesh of all devices; in a run of one process, of the first `sharding.devices`.

    Raises:
      ValueError: JAX has fewer devices, or the mesh's axes do not multiply to their number.
    """
    devices, wanted = jax.devices(), sharding.devices
    if wanted is not None and jax.process_count() == 1:
        if len(devices) < wanted:
            raise ValueError(
                f"sharding.devices = {wanted}, but JAX has {len(devices)}: ask for fewer, or restart Python (the "
                "number is fixed once JAX runs)"
            )
        devices = devices[:wanted]
    sizes = {axis: getattr(sharding, axis) for axis in ("data", "replica", "tensor", "pipeline")}
    return jaxshard.make_mesh(**sizes, devices=devices)


def simulate_cpus(wanted: int | None) -> None:
    """Simulates CPU devices, unless JAX has started or, with None, the user has chosen their number.

    `wanted` counts the devices of all processes. With several, each one's environment gives its number.
    """
    wanted = None if os.environ.get("JAX_NUM_PROCESSES", "1") != "1" else wanted
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0 or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if wanted is None and chosen:
        return
    number = min(wanted or _SIMULATED_DEVICES, MOST_SIMULATED)
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:  # JAX has started, and its devices are fixed
        return
    os.environ.setdefault("NPROC", str(2 * number))  # threads of XLA (see optimizer/owners/owners.py)


def _join_processes(heartbeat_seconds: int) -> None:
    try:
        jaxshard.initialize(heartbeat_timeout_seconds=heartbeat_seconds)
    except RuntimeError as error:  # JAX has started: its starter has joined the processes, or wants one process
        if "must be called before" not in str(error) and "only be called once" not in str(error):
            raise


def devices_of(machine: jaxshard.aot.Machine) -> list[Any]:
    """The devices to compile for; simulates CPU devices, if JAX has not started."""
    if machine.chip.platform == "cpu":
        if machine.num_devices > MOST_SIMULATED:
            raise ValueError(f"--compile {machine.name}: at most {MOST_SIMULATED} CPU devices can be simulated")
        with contextlib.suppress(RuntimeError):  # JAX has started, and its devices are fixed
            jax.config.update("jax_num_cpu_devices", machine.num_devices)
    return jaxshard.aot.devices(machine)
