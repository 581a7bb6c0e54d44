"""Compiles the tests' programs fast, and each only once.

* XLA skips its costly passes. Results and traffic stay the same, except for rounding and peak memory.
* Programs are cached in the memory of the test process. JAX's persistent cache does not work: XLA for CPU runs the
  collectives of a reloaded program in any order, and then hangs or aborts.

JAX has no public API for the second. If JAX moves its function, the tests only become slower.
"""

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import jax

AS_USERS_COMPILE = os.environ.get("JAXSHARD_TESTS") == "as-users-compile"  # `make nightly` does
# Cached programs. Linux allows a process 65,530 memory maps. LLVM uses about 20 for each of the 4000 programs of a full
# run, and 330 for a program with many optimizers that is compiled as users do.
_MOST = 40 if AS_USERS_COMPILE else 200
_FASTER = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}  # half the time; jax 0.10


def keep_programs(most: int = _MOST) -> None:
    """From now on, compiles each of `most` programs once in this process; JAX still reports every compilation."""
    _faster()  # asked now, since asking compiles
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compiler

        compiler.backend_compile_and_load = _kept(compiler.backend_compile_and_load, most)


def compile_fast(yes: bool) -> None:
    """Sets whether XLA skips its costly passes from now on."""
    jax.config.update("jax_disable_most_optimizations", yes)


def fast_flags() -> str:
    """The same as XLA_FLAGS, for a program that a test starts."""
    options = {"xla_backend_optimization_level": 0} | _faster()
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


def fast_environment(**more: str) -> dict[str, str]:
    """The environment of a program that a test starts: imports this checkout, uses CPUs, and compiles as the tests do.

    It hides libtpu, which aborts if XLA_FLAGS has flags that it does not know.
    """
    made = {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    made |= {} if AS_USERS_COMPILE else {"XLA_FLAGS": fast_flags()}
    return os.environ | made | more


@functools.cache
def _faster() -> dict[str, bool | int]:
    """More options that save time, if this XLA has them; an unknown flag would abort a program."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: x, compiler_options=_FASTER).lower(0.0).compile()
        return _FASTER
    return {}


def _kept(compile_program, most):
    programs: dict[bytes, Any] = {}  # the most recently used is last

    def compile_once(backend, module, devices, options, host_callbacks):
        if backend.platform != "cpu":
            return compile_program(backend, module, devices, options, host_callbacks)
        if options.executable_build_options.debug_options.xla_backend_optimization_level == 0:
            options.env_option_overrides = [*options.env_option_overrides, *_faster().items()]
        text = module.operation.get_asm(enable_debug_info=False)
        if host_callbacks or "callback" in text:
            return compile_program(backend, module, devices, options, host_callbacks)
        where = ",".join(str(device.id) for device in devices)
        key = hashlib.sha256(text.encode()).digest() + where.encode() + options.SerializeAsString()
        program = programs.pop(key, None)
        if program is None:
            program = compile_program(backend, module, devices, options, host_callbacks)
        programs[key] = program
        if len(programs) > most:
            programs.pop(next(iter(programs)))
        return program

    return compile_once
