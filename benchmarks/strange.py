"""Models that nobody tuned for: jaxshard beside several peers by a jit with shardings, for machines that are not here.

    python benchmarks/strange.py --machines h100:8 v5e:2x4 --models moe clip --strategies zero3 --dtypes float32 cast

The TPU or GPU compiler must be installed. Nothing runs. A line is: machine, model, strategy, dtype, step, then peak,
wire and exposed MB (collectives beside which no matrix product runs), traffic in GB, the seconds to compile, and these
ratios to the peer with the least peak: of peak, wire, traffic and exposed; and of wire to the least of any peer.
"""

import argparse
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable

import jax

import jaxshard
from jaxshard.apps.bench import gspmd, models
from jaxshard.apps.bench.gspmd import Peer
from jaxshard.apps.bench.step import Figures, Step, Task, figures, ours

DTYPES = ("float32", "masters", "cast")
OLD = ("decoder", "unrolled", "conv")
Numbers = tuple[float, float, float, float]  # peak, wire and exposed MB, traffic GB


def peers(zero: int, task: Task) -> dict[str, Peer]:
    """The peers by name; those whose programs would be equal are left out."""
    best = gspmd.best(zero, task.platform)
    found = {
        "plain": Peer(zero, constrained=False),
        "constrained": Peer(zero),
        "loop": Peer(zero, prevent_cse=False, in_loop=True),
        "best": best,
        "best-no-loop": dataclasses.replace(best, in_loop=False),
    }
    if "embed" in task.model.shapes():
        found |= {"plain-features": Peer(zero, constrained=False, table=1)}
        found |= {"best-rows": dataclasses.replace(best, table=0)}
    kept = {}
    for name, peer in found.items():
        peer = dataclasses.replace(peer, prevent_cse=peer.prevent_cse and not getattr(task.model, "plain", False))
        kept |= {} if peer in kept.values() else {name: peer}
    return kept


def numbers(found: Figures) -> Numbers:
    """A line's numbers."""
    exposed = (found.payload_bytes - found.covered_bytes) / 1e6
    return found.peak_bytes / 1e6, found.wire_bytes / 1e6, exposed, found.traffic_bytes / 1e9


def compiled(build: Callable[[], Step], label: str) -> tuple[str, Numbers] | None:
    """The start of a line, and its numbers; prints what a library or a compiler refuses."""
    start = time.perf_counter()
    try:
        found = numbers(figures(build().lower().compile()))
    except Exception as error:  # the other steps go on
        print(f"{label} {type(error).__name__}: {' '.join(str(error).split())[:500]}", flush=True)
        return None
    return f"{label} {' '.join(f'{x:.1f}' for x in found)} {time.perf_counter() - start:.0f}s", found


def measure(machine: str, name: str, strategy: str, dtype: str, few: bool) -> None:
    """Prints a line for each peer, and jaxshard's."""
    mesh = jax.sharding.Mesh(jaxshard.aot.devices(jaxshard.aot.machine(machine)), ("data",))
    model = models.model(name, dtype="float32" if dtype == "float32" else "bfloat16")
    task = Task(model, mesh, model.rows, masters=dtype == "masters")
    label = f"{machine} {name} {strategy} {dtype}"
    own = compiled(lambda: ours(strategy, task), f"{label} jaxshard")
    others = [
        compiled(functools.partial(gspmd.build_peer, peer, task), f"{label} {peer_name}")
        for peer_name, peer in peers(int(strategy[-1]), task).items()
        if not few or peer_name in ("constrained", "best", "best-rows")
    ]
    others = [line for line in others if line]
    best = min(found for _, found in others)
    least = min(found[1] for _, found in others)
    for line, (peak, wire, exposed, traffic) in [*others, *([own] if own else [])]:
        pairs = ((peak, best[0]), (wire, best[1]), (traffic, best[3]), (exposed, best[2]), (wire, least))
        print(line, " ".join(f"{one / other:.3f}" if other else "-" for one, other in pairs), flush=True)


def main() -> None:
    """Measures all that is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machines", nargs="+", default=["h100:8", "v5e:2x4"])
    parser.add_argument(
        "--models", nargs="+", default=[x for x in models.MODELS if x not in OLD], choices=models.MODELS
    )
    parser.add_argument("--strategies", nargs="+", default=["zero2", "zero3"], choices=["zero2", "zero3"])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--few", action="store_true", help="only the peers that were best most often")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    warnings.simplefilter("always")
    for strategy in options.strategies:
        for dtype in options.dtypes:
            for machine in options.machines:
                for name in options.models:
                    measure(machine, name, strategy, dtype, options.few)


if __name__ == "__main__":
    main()
