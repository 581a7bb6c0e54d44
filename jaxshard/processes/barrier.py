"""A barrier for all processes of a run, with a time limit, that names who is missing.

JAX has this barrier in the client of its coordination service, and no public way to it: `jax.distributed` only joins
and leaves, and `jax.experimental.multihost_utils.sync_global_devices` waits without a limit and names nobody. Orbax has
a public way (`orbax.checkpoint.multihost`); no other module here uses it.
"""

import jax


def wait_for_all(name: str, seconds: float) -> None:
    """Waits until all processes have called this with the same name. Each name serves once.

    Raises:
      ModuleNotFoundError: orbax is not installed.
      Exception: not all came within `seconds`. The message, which is the coordination service's, names who is missing;
        its type depends on the version of JAX.
    """
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
    wait(key=name, timeout_ms=int(seconds * 1000))
