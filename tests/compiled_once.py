"""Compiles a program once, however often tests ask for it: half of what they compile, they had compiled before.

JAX's persistent cache would do this too. But XLA for CPU runs the collectives of a program that it reads back in any
order, and then hangs or aborts. So the programs are kept in the memory of the test process, which JAX has no public way
to do. If JAX moves its function, the tests only become slower.
"""

import contextlib
import hashlib
from typing import Any


def keep_programs() -> None:
    """From now on each program is compiled once in this process; JAX still reports every compilation."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compiler

        compiler.backend_compile_and_load = _kept(compiler.backend_compile_and_load)


_MOST = 200  # programs kept; a whole run has 4000, and LLVM maps memory for each until Linux allows no more


def _kept(compile_program):
    programs: dict[bytes, Any] = {}  # the one that was used last is last

    def compile_once(backend, module, devices, options, host_callbacks):
        text = module.operation.get_asm(enable_debug_info=False)
        if backend.platform != "cpu" or host_callbacks or "callback" in text:
            return compile_program(backend, module, devices, options, host_callbacks)
        where = ",".join(str(device.id) for device in devices)
        key = hashlib.sha256(text.encode()).digest() + where.encode() + options.SerializeAsString()
        program = programs.pop(key, None)
        if program is None:
            program = compile_program(backend, module, devices, options, host_callbacks)
        programs[key] = program
        if len(programs) > _MOST:
            programs.pop(next(iter(programs)))
        return program

    return compile_once
