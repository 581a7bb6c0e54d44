"""Exact figures of small steps, compiled for v5e:2x4 by the TPU's compiler, against those in expected.json.

    python benchmarks/gate.py                                # compares; status 1 where a figure changed
    python benchmarks/gate.py --write "why they changed"     # keeps the new figures, with the reason

Nothing runs, and no TPU is needed, only libtpu. CI compares them (`tests/test_gate.py`). Peaks and the numbers of
collectives are the compiler's doing: these are compared with the libtpu and the JAX that expected.json names.
"""

import argparse
import collections
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from global_view import BatchNormNet

import jaxshard
from jaxshard.apps.bench.models import model
from jaxshard.apps.bench.step import Task, ours

EXPECTED = Path(__file__).with_name("expected.json")
MACHINE = "v5e:2x4"
BY_COMPILER = ("peak_bytes", "collectives")

Figures = dict[str, Any]


def _case(
    strategy: str, *, replica: int = 1, microbatches: int = 1, masters: bool = False, cast: bool = False
) -> Callable[[], Figures]:
    """A small transformer; `cast`: the loss casts float32 params to bfloat16."""

    def figures() -> Figures:
        mesh, dtype = _mesh(replica), "bfloat16" if masters or cast else "float32"
        small = model("decoder", layers=2, width=1024, hidden=2048, heads=8, vocabulary=4096, length=128, dtype=dtype)
        step = ours(strategy, Task(small, mesh, 16 * microbatches, microbatches, masters))
        return _figures(jaxshard.inspect.report(step.lower().compile()))

    return figures


def _with_batch_norm(strategy: str) -> Callable[[], Figures]:
    """A small convolutional network, which runs in the global view."""

    def figures() -> Figures:
        small = BatchNormNet(channels=(128, 256), depth=1, size=16, classes=128)
        step = ours(strategy, Task(small, _mesh(), 64), loss_view="global")
        return _figures(jaxshard.inspect.report(step.lower().compile()))

    return figures


def _of_zoo(
    strategy: str, name: str, rows: int = 64, cast: bool = False, loss_view: Any = "auto", **sizes: Any
) -> Callable[[], Figures]:
    """A small model of the benchmarks; `cast`: the loss casts float32 params to bfloat16."""

    def figures() -> Figures:
        small = model(name, "small", dtype="bfloat16" if cast else "float32", **sizes)
        step = ours(strategy, Task(small, _mesh(), rows), loss_view=loss_view)
        return _figures(jaxshard.inspect.report(step.lower().compile()))

    return figures


def _mesh(replica: int = 1) -> jax.sharding.Mesh:
    return jaxshard.make_mesh(replica=replica, devices=jaxshard.aot.devices(jaxshard.aot.machine(MACHINE)))


def _figures(report: jaxshard.inspect.Report) -> Figures:
    params, state, _ = report.arguments
    counted = collections.Counter(c.kind for c in report.collectives if c.group_size > 1)
    return {
        "wire_bytes": round(report.wire_bytes),
        "params_bytes": params,
        "state_bytes": state,
        "collectives": dict(sorted(counted.items())),
        "peak_bytes": report.peak_bytes,
    }


CASES = {
    "ddp": _case("ddp"),
    "zero1, 2 microbatches": _case("zero1", microbatches=2),
    "zero2": _case("zero2"),
    "zero2, bfloat16 with masters, 2 microbatches": _case("zero2", masters=True, microbatches=2),
    "zero3": _case("zero3"),
    "zero3, float32 params cast to bfloat16": _case("zero3", cast=True),
    "hsdp, 2 replicas": _case("hsdp", replica=2),
    "zero2, BatchNorm in the global view": _with_batch_norm("zero2"),
    "zero3, BatchNorm in the global view": _with_batch_norm("zero3"),
    "zero3, vision transformer, cast to bfloat16": _of_zoo("zero3", "vit", cast=True, layers=2, width=512, hidden=2048),
    "zero3, tables": _of_zoo("zero3", "dlrm", rows=512),
    "zero3, state spaces by associative_scan": _of_zoo("zero3", "ssm", rows=16, layers=2, length=64),
    "zero3, MLP without unshard": _of_zoo("zero3", "mlp", rows=256),
    "zero2, U-Net": _of_zoo("zero2", "unet", rows=16, channels=(128, 128), depth=1, size=8),
    "zero3, mixture of experts": _of_zoo("zero3", "moe", rows=16, layers=2),
    "zero3, encoder and decoder": _of_zoo("zero3", "translator", rows=16, layers=2),
    "zero2, two towers in the global view": _of_zoo("zero2", "clip", loss_view="global", layers=1),
}


def versions() -> dict[str, str]:
    """Of what compiles."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def differences(case: str, found: Figures, expected: dict[str, Any]) -> list[str]:
    """A line for each figure that is not as expected, with both numbers."""
    same_compiler = versions() == expected["versions"]
    wanted = expected["figures"].get(case, {})
    lines = []
    for name, number in found.items():
        if number != wanted.get(name) and (same_compiler or name not in BY_COMPILER):
            lines.append(f"{case}: {name} is {number}, expected {wanted.get(name)}")
    return lines


def main() -> int:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", metavar="REASON", help="keep the new figures; why did they change?")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    found = {case: figures() for case, figures in CASES.items()}
    if options.write is not None:
        if not options.write.strip():
            parser.error("--write needs a reason")
        kept = {"machine": MACHINE, "versions": versions(), "reason": options.write, "figures": found}
        EXPECTED.write_text(json.dumps(kept, indent=2) + "\n")
        return 0
    expected = json.loads(EXPECTED.read_text())
    lines = [line for case, figures in found.items() for line in differences(case, figures, expected)]
    print("\n".join(lines) or "all as expected")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
