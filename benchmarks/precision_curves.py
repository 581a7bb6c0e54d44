"""Loss curves of the reference model in several precisions, beside float32's: who follows it, and who does not.

    python benchmarks/precision_curves.py --figure docs/precision_curves.png

All train a small setting of the model of `jaxshard train`, at the rates of configs/gpt2_124m.toml, from the same
initial parameters and on the same rows; computation is in float32 throughout, so that what differs is what is kept. The
band is how far float32 itself goes when the order of the text is another one: a precision follows float32 if its
held-out loss stays as near in the second half of training.

Plain bf16 parameters lose every update below half a unit in their last place, 1/512 to 1/256 of a weight. At the rates
that large models need (6e-4 and less) these are most; at the 3e-3 that suits a model as small as this one they are few,
and `--learning-rate 3e-3` shows little of it.

Expect after 400 steps, in nats per byte held out: float32 2.171, band 0.022; bf16 with masters 0.001 from it, with
stochastic rounding 0.001 (0.003 with bf16 moments too), fp16 with masters and a loss scale 0.008 (its first three steps
are skipped, and the warm-up waits); bf16 alone 0.219, and growing. About 3 minutes of one core.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ShardingConfig,
    TrainConfig,
)
from jaxshard.apps.trainer.build import Run, prepare

PRECISIONS = {
    "bf16, f32 masters": PrecisionConfig(params="bfloat16", masters=True),
    "bf16, f32 masters, bf16 moments": PrecisionConfig(params="bfloat16", masters=True, moments="bfloat16"),
    "f32, 8-bit moments": PrecisionConfig(moments="int8"),
    "bf16, f32 masters, 8-bit moments": PrecisionConfig(params="bfloat16", masters=True, moments="int8"),
    "bf16, stochastic rounding": PrecisionConfig(params="bfloat16", stochastic_rounding=True),
    "bf16, stochastic, bf16 moments": PrecisionConfig(params="bfloat16", stochastic_rounding=True, moments="bfloat16"),
    "fp16, f32 masters, loss scale": PrecisionConfig(params="float16", masters=True, loss_scale=True),
    "bf16, nothing else": PrecisionConfig(params="bfloat16"),
}
SMOOTHED_OVER = 20  # steps


@dataclasses.dataclass(frozen=True)
class Curve:
    """Losses in nats: of each step (NaN where it was skipped), held out at `steps`, and how long it took."""

    losses: np.ndarray
    steps: np.ndarray
    heldout: np.ndarray
    bytes_per_parameter: float
    seconds: float

    @property
    def smoothed(self) -> np.ndarray:
        """Means over the last `SMOOTHED_OVER` steps."""
        windows = np.lib.stride_tricks.sliding_window_view(self.losses, SMOOTHED_OVER)
        return np.nanmean(windows, axis=-1)


def train(config: Config, orders: Sequence[int] = (0,)) -> list[Curve]:
    """A run for each of `orders`, seeds of the order of the text alone."""
    check(config)
    run = prepare(config)
    step, evaluate = run.make_step(), run.make_evaluate()
    batches = [dataclasses.replace(run.batches, seed=order) for order in orders]
    return [train_once(dataclasses.replace(run, batches=each), step, evaluate) for each in batches]


def train_once(run: Run, step: Any, evaluate: Any) -> Curve:
    start, train = run.start(), run.config.train
    params, state = start.params, start.state
    kept = sum(x.nbytes for x in jax.tree.leaves((params, state))) / sum(x.size for x in jax.tree.leaves(params))
    began, metrics, steps, heldout = time.perf_counter(), [], [], []
    for index in range(train.steps):
        params, state, found = step(params, state, run.batch(index), *run.keys(index))
        metrics.append(found)
        if (index + 1) % train.eval_every == 0:
            steps.append(index + 1)
            heldout.append(evaluate(params))
    losses = [np.nan if bool(found["skipped"]) else float(found["loss"]) for found in metrics]
    return Curve(np.asarray(losses), np.asarray(steps), np.asarray(heldout), kept, time.perf_counter() - began)


def distance(curve: Curve, other: Curve) -> float:
    """The largest between two held-out curves, in their second half: what a model is worth is decided there."""
    half = len(curve.steps) // 2
    return float(np.max(np.abs(curve.heldout - other.heldout)[half:]))


def table(curves: Mapping[str, Curve], band: float) -> str:
    """A line for each precision."""
    want = curves["float32"]
    lines = [f"{'':34}{'bytes/param':>12}{'held out':>10}{'distance':>10}{'training':>10}{'skipped':>9}{'seconds':>9}"]
    for name, curve in curves.items():
        far, training = distance(curve, want), float(np.max(np.abs(curve.smoothed - want.smoothed)))
        skipped, verdict = int(np.isnan(curve.losses).sum()), "follows" if far <= band else "DOES NOT FOLLOW"
        lines.append(
            f"{name:34}{curve.bytes_per_parameter:12.1f}{curve.heldout[-1]:10.4f}{far:10.4f}{training:10.4f}"
            f"{skipped:9d}{curve.seconds:9.1f}  {verdict}"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Mapping[str, Curve], others: list[Curve]) -> None:
    """Each held-out curve less float32's, with the band."""
    want = curves["float32"]
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    spread = np.max([np.abs(other.heldout - want.heldout) for other in others], axis=0)
    axes.fill_between(want.steps, -spread, spread, color="#e3e8ee", label="float32, other orders of the text")
    for name, curve in curves.items():
        alone = name == "bf16, nothing else"
        axes.plot(curve.steps, curve.heldout - want.heldout, label=name, linewidth=2.4 if alone else 1.3)
    axes.set(xlabel="step", ylabel="held-out loss less float32's (nats per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--strategy", default="zero2", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--orders", type=int, default=3, help="float32 runs that make the band")
    parser.add_argument("--only", nargs="*", default=list(PRECISIONS), choices=PRECISIONS, help="beside float32")
    parser.add_argument("--figure", type=Path, help="where to draw the curves")
    options = parser.parse_args()
    config = Config(
        data=DataConfig(heldout_bytes=2**14),
        model=ModelConfig(
            layers=options.layers,
            width=options.width,
            heads=options.width // 32,
            hidden=8 * options.width // 3,
            sequence_length=64,
            remat=False,
        ),
        optimizer=OptimizerConfig(learning_rate=options.learning_rate, final_fraction=0.1, beta2=0.95),
        sharding=ShardingConfig(strategy=options.strategy, devices=options.devices),
        train=TrainConfig(steps=options.steps, eval_every=max(1, options.steps // 10)),
    )
    first, *others = train(config, range(options.orders + 1))
    chosen = {name: dataclasses.replace(config, precision=PRECISIONS[name]) for name in options.only}
    curves = {"float32": first} | {name: train(each)[0] for name, each in chosen.items()}
    band = max(distance(other, curves["float32"]) for other in others)
    print(table(curves, band))
    print(f"band: {band:.4f} nats per byte, between float32 and {len(others)} float32 runs on the text in other orders")
    if options.figure:
        draw(options.figure, curves, others)


if __name__ == "__main__":
    main()
