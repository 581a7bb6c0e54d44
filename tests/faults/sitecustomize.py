"""Python runs this first in each process of a `Group`: all of them keep their programs, where JAX lets one alone do so.

(On CPU each process has programs of its own, so that all but the first would compile at every start.)
"""

import types

from jax._src import compiler  # noqa: TID251 (the switch is nowhere else)

if hasattr(compiler, "distributed"):
    compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0, client=None))
