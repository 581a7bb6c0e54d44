"""What `jaxshard.plan` predicts beside what the compiler finds, over the strategies, for machines that are not here.

    python benchmarks/plan_cases.py --machine v5e:2x4
    python benchmarks/plan_cases.py --machine h100:8
    python benchmarks/plan_cases.py --machine h100:8 --models

The cases are the reference model at GPT-2 small's size, in float32 and in bfloat16 with float32 masters, or three
models of `jaxshard bench`. The TPU or GPU compiler must be installed; its reports are kept ($JAXSHARD_CACHE), so that a
second run compiles nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import jaxshard
from jaxshard.apps.bench import models
from jaxshard.apps.bench.step import optimizer
from jaxshard.apps.config.config import Config, ModelConfig, PrecisionConfig, ShardingConfig, TrainConfig
from jaxshard.cli.plan.rows import building
from jaxshard.optimizer.state import init
from jaxshard.step.step import loss_of

GPT2_SMALL = ModelConfig(
    layers=12,
    width=768,
    heads=12,
    hidden=3072,
    sequence_length=1024,
    vocabulary=50304,
    positions="learned",
    mlp="gelu",
    tied=False,
)
DTYPES = {
    "f32": (dataclasses.replace(GPT2_SMALL, dtype="float32"), PrecisionConfig()),
    "bf16": (dataclasses.replace(GPT2_SMALL, dtype="bfloat16"), PrecisionConfig(params="bfloat16", masters=True)),
}
DATA_ONLY = [jaxshard.plan.Candidate(strategy, data=8) for strategy in ("ddp", "zero1", "zero2", "zero3")]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how 8 devices train it."""

    dtype: str
    candidate: jaxshard.plan.Candidate
    rows: int = 16
    stage_microbatches: int = 1

    @property
    def name(self) -> str:
        return f"{self.candidate.name}, {self.dtype}"

    @property
    def config(self) -> Config:
        model, precision = DTYPES[self.dtype]
        sharding = ShardingConfig(stage_microbatches=self.stage_microbatches)
        return Config(model=model, precision=precision, sharding=sharding, train=TrainConfig(rows=self.rows))

    def outcome(self, machine: jaxshard.aot.Machine) -> Outcome:
        c, build = self.candidate, building(self.config)
        target = jaxshard.plan.Target(machine.chip, machine.num_devices, machine.chip.memory_bytes)
        prediction = jaxshard.plan.predict(*build(c, c.mesh(target)))
        step, params, *rest = build(c, jaxshard.make_mesh(**c.sizes, devices=jaxshard.aot.devices(machine)))
        lowered = step.lower(params, init(loss_of(step).setup, params), *rest)
        return Outcome(self, prediction, jaxshard.aot.report(lowered, machine))


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """A model of `jaxshard bench`, and how 8 devices train it on 16 rows."""

    model: str
    strategy: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.strategy} {self.dtype}"

    def outcome(self, machine: jaxshard.aot.Machine) -> Outcome:
        mesh = jaxshard.make_mesh(data=8, devices=jaxshard.aot.devices(machine))
        dtype = {"f32": "float32", "bf16": "bfloat16"}[self.dtype]
        model = models.model(self.model, **({"dtype": dtype} if self.dtype == "bf16" else {}))

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return models.loss(model, params, batch)

        opt = getattr(jaxshard, self.strategy)(optimizer(), mesh)
        step, params, batch = (
            jaxshard.train_step(loss_fn, opt),
            opt.place(models.init(model, dtype)),
            model.batch(16),
        )
        report = jaxshard.aot.report(step.lower(params, opt.init(params), batch), machine)
        return Outcome(self, jaxshard.plan.predict(step, params, batch), report)


CASES = [
    *(Case(dtype, c) for c in (*DATA_ONLY, jaxshard.plan.Candidate("hsdp", data=4, replica=2)) for dtype in DTYPES),
    Case("f32", jaxshard.plan.Candidate("zero2", data=8, microbatches=4), rows=64),
    Case("bf16", jaxshard.plan.Candidate("zero3", data=8, microbatches=4), rows=64),
    Case("f32", jaxshard.plan.Candidate("hybrid", data=4, tensor=2, zero=2)),
    Case("bf16", jaxshard.plan.Candidate("hybrid", data=4, tensor=2, zero=3)),
    Case("f32", jaxshard.plan.Candidate("hybrid", data=2, pipeline=4, zero=1), rows=32, stage_microbatches=8),
    Case(
        "bf16", jaxshard.plan.Candidate("hybrid", data=2, pipeline=2, tensor=2, zero=2), rows=32, stage_microbatches=4
    ),
]
MODEL_CASES = [ModelCase("conv", strategy, dtype) for strategy in ("zero2", "zero3") for dtype in DTYPES] + [
    ModelCase(model, strategy, dtype)
    for model in ("decoder", "unrolled")
    for strategy, dtype in (("zero2", "f32"), ("zero3", "f32"), ("zero3", "bf16"))
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Predicted beside compiled, of one case."""

    case: Case | ModelCase
    prediction: jaxshard.plan.Prediction
    report: jaxshard.inspect.Report

    @property
    def peak(self) -> float:
        """Predicted / compiled."""
        return self.prediction.peak_bytes / self.report.peak_bytes

    @property
    def wire(self) -> float:
        """Predicted / compiled."""
        return self.prediction.wire_bytes / self.report.wire_bytes

    @property
    def at_rest_equal(self) -> bool:
        held = self.prediction.at_rest
        return (held["params"], held["state"]) == self.report.arguments[:2]

    def line(self) -> str:
        peaks = f"{self.prediction.peak_bytes / 1e6:,.0f} | {self.report.peak_bytes / 1e6:,.0f} | {self.peak:.3f}"
        wires = f"{self.prediction.wire_bytes / 1e6:,.1f} | {self.report.wire_bytes / 1e6:,.1f} | {self.wire:.4f}"
        return f"| {self.case.name} | {peaks} | {wires} | {'yes' if self.at_rest_equal else 'no'} |"


def outcomes(machine: jaxshard.aot.Machine, cases: Sequence[Case | ModelCase]) -> Iterator[Outcome]:
    """Each case, predicted and compiled."""
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case.name}", file=sys.stderr, flush=True)
        yield case.outcome(machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--machine", default="v5e:2x4", help="8 devices: v5e:2x4 or h100:8")
    parser.add_argument("--models", action="store_true", help="the cases are models of jaxshard bench")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    machine = jaxshard.aot.machine(options.machine)
    if machine.num_devices != 8:
        parser.error(f"--machine {machine.name} has {machine.num_devices} devices; the cases are for 8")

    print(f"{machine.name}, MB per device and step; ratios are predicted / compiled\n")
    print("| case | peak, predicted | compiled | ratio | sent, predicted | compiled | ratio | at rest equal |")
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    found = []
    for outcome in outcomes(machine, MODEL_CASES if options.models else CASES):
        found.append(outcome)
        print(outcome.line(), flush=True)
    peaks, wires = sum(abs(o.peak - 1) <= 0.10 for o in found), sum(abs(o.wire - 1) <= 0.01 for o in found)
    held = sum(o.at_rest_equal for o in found)
    print(f"\nPeak within 10%: {peaks} of {len(found)}; sent within 1%: {wires} of {len(found)}; ", end="")
    print(f"at rest equal: {held} of {len(found)}.")


if __name__ == "__main__":
    main()
