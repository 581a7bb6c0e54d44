"""What the TPU compiler makes of a step on 8 to 4096 chips: bytes sent, bytes at rest, and the time to compile.

    python benchmarks/scaling.py --figure docs/scaling.png

No TPU is needed. The model is a transformer of stacked layers whose dims each of the mesh's two data axes can cut:
"slice" is a side of the torus and "data" the other two. (A collective over a whole 3-D torus at once may be compiled to
an all-reduce, at twice the bytes; the last column shows it.) Weak scaling has a row per
chip, strong scaling 4096 rows. Bytes sent per chip should stay, but for the (N-1)/N of each collective; state should be
1/N.

Compile times hold tracing, lowering and compiling; on a machine that does other work too, trust its CPU seconds.
"""

import argparse
import collections
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import jaxshard
from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.model.model import LanguageModel
from jaxshard.optimizer.state import init
from jaxshard.step.step import loss_of

MACHINES = ("v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x16")
STRATEGIES = ("zero2", "zero3")
MODEL = ModelConfig(
    layers=8,
    width=4096,
    heads=32,
    hidden=16384,
    sequence_length=128,
    vocabulary=4096,
    mlp="gelu",
    dtype="bfloat16",
)
STRONG_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Point:
    """One compiled step."""

    strategy: str
    scaling: str  # "weak" or "strong"
    num_devices: int
    rows: int
    report: jaxshard.inspect.Report
    prediction: jaxshard.plan.Prediction
    seconds: float
    cpu_seconds: float

    @property
    def state_bytes(self) -> int:
        return self.report.arguments[1]

    def kinds(self) -> str:
        """How often each kind of collective runs, and its part of the bytes."""
        counts, sizes = collections.Counter(), collections.Counter()
        for c in self.report.collectives:
            counts[c.kind] += c.trips
            sizes[c.kind] += c.wire_bytes
        return ", ".join(f"{counts[k]} {k} ({sizes[k] / self.report.wire_bytes:.1%})" for k in sorted(counts))


def mesh_of(machine: jaxshard.aot.Machine) -> Mesh:
    """Axes ("slice", "data"): a side of the torus, and the other two."""
    return Mesh(np.asarray(jaxshard.aot.devices(machine)).reshape(machine.shape[0], -1), ("slice", "data"))


def built(strategy: str, mesh: Mesh, rows: int) -> tuple[Any, ...]:
    """(step, params, batch), the last two abstract."""
    model = LanguageModel(MODEL)
    opt = getattr(jaxshard, strategy)(optax.adamw(3e-4), mesh, data_axes=("slice", "data"))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        opt.shardings(shapes).params,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((rows, MODEL.sequence_length + 1), np.int32)}
    return jaxshard.train_step(model.loss, opt, donate=True), params, batch


def point(strategy: str, scaling: str, machine: jaxshard.aot.Machine, rows: int) -> Point:
    """Compiles, without any cache."""
    jax.clear_caches()
    step, params, batch = built(strategy, mesh_of(machine), rows)
    state = init(loss_of(step).setup, params)
    start = time.perf_counter(), time.process_time()
    compiled = step.lower(params, state, batch).compile(compiler_options=dict(jaxshard.aot.READABLE[machine.chip.name]))
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    prediction = jaxshard.plan.predict(step, params, batch)
    report = jaxshard.inspect.report(compiled)
    return Point(strategy, scaling, machine.num_devices, rows, report, prediction, seconds, cpu_seconds)


def points(machines: Sequence[jaxshard.aot.Machine], strategies: Sequence[str]) -> Iterator[Point]:
    """All of them, but those whose compiled program libtpu cannot write out."""
    warm_up(machines[0])
    for strategy in strategies:
        for machine in machines:
            count = machine.num_devices
            for rows in dict.fromkeys((count, STRONG_ROWS)):
                try:
                    found = point(strategy, "weak" if rows == count else "strong", machine, rows)
                except jax.errors.JaxRuntimeError as error:
                    reason = str(error).splitlines()[0]
                    print(f"{strategy}, {rows} rows, {count} chips is left out: {reason}", file=sys.stderr, flush=True)
                    continue
                yield found
                if count == STRONG_ROWS:
                    yield dataclasses.replace(found, scaling="strong")


def warm_up(machine: jaxshard.aot.Machine) -> None:
    """The compiler starts, and whatever tracing loads."""
    built("zero3", mesh_of(machine), machine.num_devices)
    replicated = NamedSharding(mesh_of(machine), PartitionSpec())
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=replicated)).compile()


def line(p: Point) -> str:
    """A row of the table."""
    wire, predicted = p.report.wire_bytes, p.prediction.wire_bytes
    cells = [p.strategy, p.scaling, f"{p.num_devices:,}", f"{p.rows:,}"]
    cells += [f"{wire / 1e9:.3f}", f"{predicted / 1e9:.3f}", f"{predicted / wire:.4f}"]
    cells += [f"{p.state_bytes / 1e6:,.3f}", f"{p.state_bytes * p.num_devices / 1e9:.4f}"]
    cells += [f"{p.report.peak_bytes / 1e9:.2f}", f"{p.prediction.peak_bytes / 1e9:.2f}"]
    return "| " + " | ".join([*cells, f"{p.seconds:.1f}", f"{p.cpu_seconds:.1f}", p.kinds()]) + " |"


HEAD = (
    "| strategy | scaling | chips | rows | sent, GB | predicted | ratio | state, MB | x chips, GB | peak, GB "
    "| predicted | compile, s | CPU s | collectives executed (part of the bytes) |\n|---|---|--:|--:|"
    + "--:|" * 9
    + "---|"
)


def verdicts(found: Sequence[Point]) -> Iterator[str]:
    """What should hold, with the figures."""
    for strategy in dict.fromkeys(p.strategy for p in found):
        mine = [p for p in found if p.strategy == strategy]
        weak = [p for p in mine if p.scaling == "weak"]
        scaled = [p.report.wire_bytes * p.num_devices / (p.num_devices - 1) for p in weak]
        yield f"{strategy}, sent x N/(N-1), weak: largest / smallest {max(scaled) / min(scaled):.4f}"
        held = [p.state_bytes * p.num_devices for p in weak]
        yield f"{strategy}, state x N: largest / smallest {max(held) / min(held):.4f}"
        for scaling in ("weak", "strong"):
            ends = [p for p in mine if p.scaling == scaling]
            wall, cpu = ends[-1].seconds / ends[0].seconds, ends[-1].cpu_seconds / ends[0].cpu_seconds
            yield f"{strategy}, {scaling}, compile time, most chips / fewest: {wall:.2f} (CPU {cpu:.2f})"


def draw(path: Path, found: Sequence[Point]) -> None:
    """Bytes sent, state and compile time against the number of chips."""
    figure = Figure(figsize=(11, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    wire, state, compile_time = figure.subplots(1, 3)
    colors = dict(zip(STRATEGIES, ("#2a6f97", "#d1603d"), strict=True))
    for key in dict.fromkeys((p.strategy, p.scaling) for p in found):
        mine = [p for p in found if (p.strategy, p.scaling) == key]
        chips, weak = [p.num_devices for p in mine], key[1] == "weak"
        style = {"color": colors[key[0]], "linestyle": "-" if weak else "--", "marker": "o" if weak else "s"}
        style |= {"markersize": 5 if weak else 8, "markerfacecolor": colors[key[0]] if weak else "none"}
        label = " ".join(key)
        wire.plot(chips, [p.report.wire_bytes / 1e9 for p in mine], label=label, **style)
        state.plot(chips, [p.state_bytes / 1e6 for p in mine], label=label, **style)
        compile_time.plot(chips, [p.cpu_seconds for p in mine], label=label, **style)
    first = min(found, key=lambda p: p.num_devices)
    chips = np.array(sorted({p.num_devices for p in found}))
    share = first.state_bytes / 1e6 * first.num_devices / chips
    state.plot(chips, share, color="#888888", linewidth=1, linestyle=":", label="1/N")
    state.set_yscale("log")
    titles = ("sent by each chip per step (GB)", "optimizer state on each chip (MB)", "lower and compile (CPU seconds)")
    for axes, title in zip((wire, state, compile_time), titles, strict=True):
        axes.set_xscale("log", base=8)
        axes.set_xticks(chips, [str(n) for n in chips])
        axes.minorticks_off()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("chips")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (wire, compile_time):
        axes.set_ylim(bottom=0)
    state.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machines", nargs="+", default=list(MACHINES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--figure", type=Path, help="where to draw them")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    machines = sorted(map(jaxshard.aot.machine, options.machines), key=lambda machine: machine.num_devices)
    count = sum(
        math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(LanguageModel(MODEL).init, jax.random.key(0)))
    )
    print(f"{count / 1e9:.3f} G float32 parameters, AdamW; per chip and step\n\n{HEAD}")
    found = []
    for p in points(machines, options.strategies):
        found.append(p)
        print(line(p), flush=True)
        print(f"{p.strategy} {p.scaling} {p.num_devices}: {p.seconds:.1f} s", file=sys.stderr, flush=True)
    print("\n" + "\n".join(f"* {text}" for text in verdicts(found)))
    if options.figure:
        draw(options.figure, found)


if __name__ == "__main__":
    main()
