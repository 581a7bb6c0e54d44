"""`jaxshard explain`: where a step's parameters are placed and gathered, and the source line of each collective."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console

from jaxshard import aot
from jaxshard.apps.commands import arguments as words
from jaxshard.apps.commands.train_options import fitting_warmup, model_of_start
from jaxshard.apps.config import paths, toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config
from jaxshard.apps.config.devices import devices_of, simulate_cpus
from jaxshard.apps.records.display import make_console
from jaxshard.cli.explain import tables as explain_tables
from jaxshard.cli.explain.explanation import Explanation, OwnStep, Subject, explained, with_compiled, with_memory
from jaxshard.cli.made import checked
from jaxshard.cli.plan.of_config import building, own
from jaxshard.mesh import make_mesh
from jaxshard.plan import Target
from jaxshard.step.step import TrainStep, loss_of, with_setup
from jaxshard.system.command import check_file, fail
from jaxshard.system.files import overwrite
from jaxshard.system.users_code import UsersError as UsersError
from jaxshard.system.users_code import blamed as blamed
from jaxshard.system.users_code import called
from jaxshard.system.users_code import names_function as names_function

_COMMAND = "jaxshard explain"
_DESCRIPTION = """Explains a training step: where each parameter is placed and why, its bytes on each device, the line
that
gathers it, and the collectives of the compiled step by line of your source.

MODULE:FUNCTION is a function of yours without arguments that returns (step, params, batch, *more): the step that
jaxshard.train_step made, and arrays or ShapeDtypeStructs as a call of it takes them. For a step of your own it returns
(step, *arguments), placed; if the function has a parameter `devices`, it gets those of the machine. A CONFIG.toml
selects the reference model, as for `jaxshard train`, with the same options. Exit status: 0 done, 1 the compiler
rejects the step, 2 bad input."""


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The command line of `jaxshard explain`."""

    what: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG.toml | MODULE:FUNCTION]")] = None
    """The step; by default that of the default configuration."""
    compile: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Compile for this machine, which you need not have: h100:8, v5e:2x4 (`jaxshard plan --help` names more); by
    default for simulated devices."""
    no_compile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile nothing: show where parameters are placed and gathered."""
    peak: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also show what a device holds at the peak of the compiled step, by line of your source."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the whole output to this file, as JSON."""


def command(arguments: Sequence[str]) -> int:
    """Runs `jaxshard explain`; returns the exit status."""
    return words.run_on_cpu(_COMMAND, lambda: _run(parse(arguments)), jax_traceback_in_locations_limit=-1)


_fail = functools.partial(fail, _COMMAND)


def parse(arguments: Sequence[str]) -> Arguments:
    """The command line over the TOML file over the defaults.

    Raises:
      ValueError: names the option that is wrong. (For a parse error, it prints the message and raises SystemExit.)
    """
    words.check(arguments, Arguments, _COMMAND, {"data": str})
    given, in_file = words.by_tyro(arguments, Arguments, _COMMAND, _DESCRIPTION, Arguments()), frozenset()
    if given.compile and given.no_compile:
        raise ValueError(f"--compile {given.compile} and --no-compile exclude each other: give one of them")
    if given.peak and given.no_compile:
        raise ValueError("--peak reads the compiled step, and --no-compile compiles nothing: give one of them")
    if given.compile:
        aot.machine(given.compile)  # so that an unknown name is reported first
    if given.json is not None:
        check_file("--json", given.json)
    if given.what is not None and names_function(given.what):
        words.refuse_options(arguments, Config, given.what)
        return given
    if given.what is not None:
        if not given.what.endswith(".toml") and not paths.configuration(Path(given.what)).exists():
            hint = paths.near_configuration(Path(given.what))
            raise ValueError(f"{given.what}: the file does not exist; write a function as MODULE:FUNCTION{hint}")
        config, in_file = toml.parsed(Path(given.what), pipes=True)
        given = words.by_tyro(arguments, Arguments, _COMMAND, _DESCRIPTION, Arguments(**vars(config)))
    model, _ = model_of_start(given, arguments, in_file)
    warmup = "optimizer.warmup_steps"
    optimizer, _ = fitting_warmup(given, warmup in in_file or words.is_given(arguments, warmup))
    given = dataclasses.replace(given, model=model, optimizer=optimizer)
    check(given)
    return given


def _run(given: Arguments) -> int:
    what = given.what or "the default configuration"
    subject = _of_function(what, given) if names_function(what) else _of_config(what, given)
    with blamed(what):
        found = explained(subject)
    console = make_console()  # not earlier: JAX starts here
    explain_tables.show_params(console, what, found)
    if given.no_compile:
        _write(given, what, found)
        return 0
    compiled = _compiled(console, what, subject, _machine(given))
    if compiled is not None:
        assert isinstance(subject.mesh, Mesh)
        found = with_compiled(found, compiled, subject.mesh)
        compiled_for = given.compile or f"{subject.mesh.size} simulated devices"
        explain_tables.show_sent(console, found, compiled_for)
        if given.peak:
            found = with_memory(found, compiled)
            explain_tables.show_memory(console, found, compiled_for)
    _write(given, what, found)
    return int(compiled is None)


def _machine(given: Arguments) -> aot.Machine:
    return aot.machine(given.compile or f"cpu:{given.sharding.devices or 8}")


def _of_config(what: str, given: Arguments) -> Subject:
    """The reference model's step."""
    machine = _machine(given)
    torus = machine.shape if machine.chip.platform == "tpu" else ()
    target = Target(machine.chip, machine.num_devices, machine.chip.memory_bytes, torus)
    candidate = own(given, target)
    planned, sizes = candidate.mesh(target), candidate.sizes
    mesh = planned if given.no_compile else make_mesh(**sizes, devices=devices_of(machine), slice_axes=())
    with blamed(what):
        return Subject.of(*building(given)(candidate, mesh))


def _of_function(what: str, given: Arguments) -> Subject | OwnStep:
    """The user's step, on the devices of the named machine, or on those that it was made for."""
    machine = aot.machine(given.compile) if given.compile else None
    simulate_cpus(None if machine is None else machine.num_devices)
    devices = None if machine is None else devices_of(machine)  # so that an impossible machine is reported at once
    subject = made_by(what, devices)
    if isinstance(subject, OwnStep):
        with blamed(what):
            mesh = subject.mesh
        if devices is not None and set(mesh.devices.flat) != set(devices):
            raise ValueError(f"{what} makes a step of your own on a mesh that is not of {given.compile}: {_DEVICES}")
        return subject
    if given.no_compile or (devices is None and isinstance(subject.mesh, Mesh)):
        return subject
    return on_devices(what, subject, jax.devices("cpu") if devices is None else devices)


def _compiled(
    console: Console, what: str, subject: Subject | OwnStep, machine: aot.Machine
) -> jax.stages.Compiled | None:
    """The compiled step; if the compiler rejects it, prints why and returns None."""
    with blamed(what):
        lowered = subject.lower()
    try:
        return aot.compiled(lowered, machine)
    except jax.errors.JaxRuntimeError as error:
        console.print(f"The compiler rejects the step: {str(error).splitlines()[0]}", soft_wrap=True)
        return None


def _write(given: Arguments, what: str, found: Explanation) -> None:
    if given.json is not None:
        compiled = None if found.sent is None else given.compile or f"cpu:{math.prod(found.sizes.values())}"
        text = json.dumps({"step": what, "compiled_for": compiled, **found.to_dict()}, indent=1)
        overwrite(given.json, text + "\n")


_WANTED = (
    "it must return (step, params, batch, *more), where step = jaxshard.train_step(loss_fn, opt); or, for a step of "
    "your own, (step, *arguments)"
)
_DEVICES = (
    "let it use the machine's devices: `def build(devices=None): mesh = jaxshard.make_mesh(devices=devices)`, and "
    "place shapes on it (jax.ShapeDtypeStruct), since the devices are not available here"
)


def made_by(what: str, devices: Sequence[Any] | None = None) -> Subject | OwnStep:
    """Calls the user's function and returns its subject.

    Args:
      what: "module:function"; the module may be in the current folder.
      devices: what the function gets, if it has a parameter of this name.

    Raises:
      ValueError: the function does not exist, or returns something else.
      UsersError: the module cannot be imported, or the function fails.
    """
    made = called(what, offered={"devices": devices})
    if isinstance(made, tuple | list) and len(made) > 1 and callable(made[0]) and not isinstance(made[0], TrainStep):
        with blamed(what):
            return OwnStep.of(*made)
    with_shapes = checked(what, made, _WANTED)
    with blamed(what):
        return Subject.of(*with_shapes)


def on_devices(what: str, subject: Subject, devices: Sequence[Any]) -> Subject:
    """Moves a subject to other devices; raises ValueError unless they are as many as in the step's mesh."""
    mesh = subject.mesh
    if mesh.size != len(devices):
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        raise ValueError(
            f"{what} makes a mesh of {mesh.size} devices ({sizes}), but JAX has {len(devices)}: use all of "
            "jax.devices(), as jaxshard.make_mesh() does, or give a machine of that size"
        )
    new = jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, devices=devices, axis_types=mesh.axis_types)
    setup = dataclasses.replace(loss_of(subject.step).setup, mesh=new)
    return subject._replace(step=with_setup(subject.step, setup))
