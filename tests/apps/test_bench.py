"""`jaxshard bench`, in this process: what it shows, writes and refuses; and that its models train as on one device."""

import functools
import json

import jax
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard import aot
from jaxshard.apps.bench import models
from jaxshard.apps.commands import bench_tables
from jaxshard.cli import main
from jaxshard.cli.plan import rows as plan_rows

TOY = ["bench", "--toy", "--rounds", "2"]
COMPILED = {
    *("peak_bytes", "wire_bytes", "covered_bytes", "payload_bytes", "num_covered", "num_collectives"),
    *("traffic_bytes", "trace_seconds", "compile_seconds"),
}
TIMED = {
    f"{what}_{figure}" for what in ("step", "update") for figure in ("seconds", "ratio", "ratio_low", "ratio_high")
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run writes, and prints."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(plan_rows.aot, "devices", without_gpu_compiler(aot.devices))
        patch.setattr("jaxshard.apps.commands.bench.say", lambda console, text: lines.append(text))
        names = ["--machines", "cpu:8", "h100:8", "--steps", "zero2", "optax", "nnx", "--microbatches", "2"]
        status = main([*TOY, *names, "--out", str(folder / "new"), "--json", str(folder / "x.json")])
    return status, lines, folder


def without_gpu_compiler(devices):
    def found(machine):
        if machine.chip.platform == "gpu":
            raise aot.CompilerMissingError("the GPU compiler is not installed")
        return devices(machine)

    return found


def test_figures_versions_and_machine_are_written(run):
    status, _, folder = run
    assert status == 0
    found = json.loads((folder / "x.json").read_text())
    assert found == json.loads((folder / "new" / "bench.json").read_text())
    assert found["date"].endswith("+00:00")
    assert found["versions"]["jax"].count(".") == 2
    assert set(found["machine"]) == {"system", "processor", "cores", "load"}
    assert found["asked"]["microbatches"] == 2
    names = [(row["machine"], row["step"]) for row in found["rows"]]
    assert names == [(machine, step) for machine in ("cpu:8", "h100:8") for step in ("zero2", "optax", "nnx")]
    zero2, optax, nnx = found["rows"][:3]
    for row in (zero2, optax):
        assert set(row) == {"machine", "model", "step", "note"} | COMPILED | TIMED
        assert row["peak_bytes"] > 0
        assert min(row[name] for name in TIMED | {"trace_seconds", "compile_seconds"}) > 0
    assert zero2["peak_bytes"] < optax["peak_bytes"]
    assert optax["step_ratio"] == 1
    assert nnx == {"machine": "cpu:8", "model": "decoder", "step": "nnx", "note": nnx["note"]}
    assert "microbatches" in nnx["note"]
    assert {row["note"] for row in found["rows"][3:]} == {"the GPU compiler is not installed"}


def test_rows_are_told_and_plotted(run):
    _, lines, folder = run
    assert "jax 0." in lines[0]
    assert lines[1].startswith("cpu:8 decoder zero2: peak ")
    assert "h100:8 decoder zero2: the GPU compiler is not installed" in lines
    assert {path.name for path in (folder / "new").iterdir()} == {"bench.json", "decoder_on_cpu_8.png"}


def test_tables_cut_no_number_off(run, monkeypatch, capsys):
    _, _, folder = run
    rows = [
        bench_tables.Row(r["machine"], r["model"], r["step"], {k: v for k, v in r.items() if k in COMPILED | TIMED})
        for r in json.loads((folder / "x.json").read_text())["rows"][:2]
    ]
    monkeypatch.setenv("COLUMNS", "150")
    bench_tables.show(bench_tables.Console(width=150), rows, "optax")
    shown = capsys.readouterr().out
    assert shown.count("zero2") == 2
    assert "…" not in shown
    assert "1.00 (1.00 to 1.00)" in shown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--steps", "zero4"], "--steps 'zero4' is unknown; did you mean 'zero3'?; choose from ddp, zero1, zero2"),
        (["--models", "x"], "--models 'x' is unknown; choose from decoder, llama, unrolled, moe"),
        (["--machines", "h101:8"], "h101"),
        (["--against", "x"], "--against 'x' is unknown; choose from ddp"),
        (["--rows", "0"], "--rows 0 must be from 1"),
        (["--rounds", "-1"], "--rounds -1 must be from 0"),
        (["--microbatches", "0"], "--microbatches 0 must be"),
        (["--options", "{"], "it must be JSON"),
        (["--options", "[1]"], "it must be a JSON object"),
        (["--processes", "1"], "--processes 1 must be from 2 to 64"),
        (["--processes", "3"], "and divide --rows 16"),
        (["--json", "nowhere/x.json"], "give a file in an existing"),
        (["--json", "/dev/null/x.json"], "give a file in an existing, writable folder"),
        (["--processes", "2", "--rounds", "0"], "--rounds 0 measures none"),
        (["--processes", "2", "--rounds", "1", "--torch", __file__], "is not a working Python"),
        (["--processes", "2", "--rounds", "1", "--torch", "/bin/ls"], "is not a working Python"),
        (["--steps"], "--steps is empty: choose from ddp"),
        (["--machines"], "--machines is empty: give some, such as h100:8"),
        (["--torch", "python3"], "--torch python3 needs --processes"),
        (["more"], "unknown argument 'more': write the option's name before its value"),
        (["--model", "conv"], "unknown option --model"),
    ],
)
def test_what_is_wrong_is_one_line(given, says, capsys):
    try:
        status = main([*TOY, *given])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2
    assert says in error
    assert error.count("\n") == 1


def test_rows_that_cannot_be_dealt_are_told(capsys):
    assert main([*TOY, "--machines", "cpu:8", "--steps", "zero2", "--rows", "12"]) == 1
    assert "12 rows cannot be split over 8 devices" in capsys.readouterr().out


def two_steps(of, step, params, state):
    """The loss of the last one, and the params."""
    loss = None
    for seed in (1, 2):
        batch = models.values(of.batch(16), seed, ids=16)
        params, state, loss = step(params, state, batch)
    return loss, params


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_trains_as_on_one_device(name):
    of, tx = models.model(name, "toy"), optax.sgd(0.1, momentum=0.9)
    start = jax.tree.map(lambda x: x * (5 if x.ndim > 1 else 1), models.values(models.init(of)))
    loss = functools.partial(models.loss, of)

    @jax.jit
    def alone(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    wanted, expected = two_steps(of, alone, start, tx.init(start))
    opt = jaxshard.zero3(tx, jaxshard.make_mesh())
    step, params = jaxshard.train_step(loss, opt), opt.place(start)
    metrics, found = two_steps(of, lambda p, s, b: step(p, s, jaxshard.shard_batch(b, opt)), params, opt.init(params))
    np.testing.assert_allclose(float(metrics["loss"]), float(wanted), rtol=1e-5)
    for (path, x), y, z in zip(jax.tree.leaves_with_path(expected), *map(jax.tree.leaves, (found, start)), strict=True):
        moved = np.abs(x - z).max()
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-6 + 1e-3 * moved, err_msg=jax.tree_util.keystr(path))
        assert moved > 0, path
