"""`jaxshard plan MODULE:FUNCTION`: a user's own step under each strategy, and steps that only a stranger writes."""

import json
import re
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import jaxshard
from jaxshard import inspect, plan
from jaxshard.cli.plan.command import command
from jaxshard.mesh import abstract_mesh

MODULE = """
    import warnings
    import jax, jax.numpy as jnp, numpy as np, optax, jaxshard
    from jax.sharding import PartitionSpec as P

    def loss(p, b):
        h = b["x"]
        for w in p["layers"]:
            h = jnp.tanh(h @ jaxshard.unshard(w))
        return jnp.mean((h @ p["out"] - b["y"]) ** 2)

    def params(dtype=jnp.float32):
        return {"layers": [jnp.zeros((256, 256), dtype)] * 4, "out": jnp.zeros((256, 128), dtype)}

    def batch():
        return {"x": np.zeros((64, 256), "f"), "y": np.zeros((64, 128), "f")}

    def build():
        return jaxshard.train_step(loss, jaxshard.zero2(optax.adamw(1e-3))), params(), batch()

    def on_own_axes():
        mesh = jax.make_mesh((2, 4), ("dp", "fsdp"))
        opt = jaxshard.hsdp(optax.adam(1e-3), mesh, data_axes="fsdp", replica_axes="dp", master_dtype="float32")
        return jaxshard.train_step(loss, opt, microbatches=2), params(jnp.bfloat16), batch()

    def with_tensor():
        def split(p, b):
            h = jaxshard.tensor.column_parallel(b["x"], p["up"])
            return jnp.mean((jaxshard.tensor.row_parallel(h, p["down"]) - b["y"]) ** 2)

        specs = [("up", P(None, "tensor")), ("down", P("tensor"))]
        opt = jaxshard.hybrid(optax.adam(1e-3), jaxshard.make_mesh(tensor=2), specs, zero=3)
        p = {"up": jnp.zeros((256, 512)), "down": jnp.zeros((512, 128))}
        return jaxshard.train_step(split, opt), p, batch()

    def keeps_gathered():
        def warns_of_rows(p, b):
            if len(b["x"]) > 64:
                warnings.warn("many rows")
            return jnp.mean(jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"]) @ p["c"])

        p = {"a": jnp.zeros((256, 4096)), "b": jnp.zeros((4096, 2048)), "c": jnp.zeros((2048, 2048))}
        return jaxshard.train_step(warns_of_rows, jaxshard.zero3(optax.adam(1e-3))), p, batch()

    def for_64_rows():
        def fixed(p, b):
            return jnp.mean(b["x"].reshape(-1, 4, 256)[:, 0] @ p["out"])

        return jaxshard.train_step(fixed, jaxshard.zero1(optax.sgd(1e-3)), loss_view="local"), params(), batch()

    def loops_until_still():
        def settle(p, b):
            h = jax.lax.while_loop(lambda h: jnp.abs(h).max() > 1, lambda h: jnp.tanh(h @ p["out"]), b["y"])
            return jnp.mean(jax.lax.stop_gradient(h) @ p["out"])

        return jaxshard.train_step(settle, jaxshard.zero1(optax.sgd(1e-3))), {"out": jnp.zeros((128, 128))}, batch()

    def bad():
        return 3

    def fails():
        raise KeyError("lost")
"""


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with the user's module; returns (status, rows by name, output, errors)."""
    (tmp_path / "a_users_train.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(function, *options):
        status = command([f"a_users_train:{function}", "--json", "plan.json", *options])
        said = capsys.readouterr()
        rows = json.loads((tmp_path / "plan.json").read_text())["rows"] if status < 2 else []
        return status, {row["name"]: row for row in rows}, said.out, said.err

    yield run
    sys.modules.pop("a_users_train", None)


def test_strategies_are_compared(planned):
    status, rows, out, _ = planned("build", "--machine", "h100:8")
    assert status == 0
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    num_params = 4 * 256 * 256 + 256 * 128
    assert [rows[name]["at_rest"]["params"] for name in rows] == [4 * num_params] * 3 + [num_params // 2]
    assert rows["zero2"]["at_rest"]["state"] == 2 * 4 * num_params // 8 + 4
    assert rows["ddp"]["wire_bytes"] == pytest.approx(2 * 7 / 8 * 4 * num_params, rel=0.01)
    assert "294,912 parameters, 64 rows a step, on 8 x h100" in out
    assert out.strip().splitlines()[-1] == "wrote plan.json"
    assert "Verdict: 4 of 4 fit" in out
    assert all(row["largest_batch"] > 64 for row in rows.values())


def test_one_row_is_what_predict_says(planned):
    _, rows, *_ = planned("build", "--machine", "h100:8", "--strategies", "own")
    step, params, batch = sys.modules["a_users_train"].build()
    mesh = abstract_mesh(8, platform="gpu", device_kind="h100")
    there = jaxshard.train_step(sys.modules["a_users_train"].loss, jaxshard.zero2(step._setup.inner, mesh))
    direct = plan.predict(there, params, batch)
    assert rows["zero2"]["peak_bytes"] == direct.peak_bytes
    assert rows["zero2"]["wire_bytes"] == direct.wire_bytes


def test_axes_of_ones_own_keep_their_names_and_options(planned):
    status, rows, *_ = planned("on_own_axes", "--machine", "h100:4x8")
    assert status == 0
    own = rows["hsdp 2 x replica, 16 x data, m 2"]
    assert own["axes"] == {"dp": 2, "fsdp": 16}
    assert own["at_rest"]["params"] == 2 * (4 * 256 * 256 + 256 * 128) // 16
    over_all = next(row for name, row in rows.items() if "state over" in name)
    assert over_all["at_rest"]["state"] < own["at_rest"]["state"]  # masters, too
    for name, row in rows.items():
        assert row["wire_bytes"] < 8 * 2 * (4 * 256 * 256 + 256 * 128), name


def test_model_axes_stay(planned):
    status, rows, *_ = planned("with_tensor", "--machine", "h100:8")
    assert status == 0
    assert list(rows) == [f"hybrid zero{z} 4 x data, 2 x tensor" for z in range(4)]
    held = [row["at_rest"]["params"] for row in rows.values()]
    assert held == [4 * 256 * (512 + 256) // 2] * 3 + [4 * 256 * (512 + 256) // 8]


def test_a_loss_for_one_number_of_rows_has_no_largest_batch(planned):
    _, rows, *_ = planned("for_64_rows", "--machine", "h100:8")
    assert all(row["largest_batch"] is None for row in rows.values())


def test_a_warning_is_about_the_users_rows_and_names_its_strategies(planned):
    _, rows, _, err = planned("keeps_gathered", "--machine", "h100:8")
    assert rows["zero3"]["largest_batch"] > 64
    assert "many rows" not in err
    assert "jaxshard plan: zero3: each device keeps up to" in err
    *_, err = planned("keeps_gathered", "--machine", "h100:8", "--strategies", "own")
    assert "jaxshard plan: each device keeps up to" in err


def test_rows_and_fit(planned):
    status, rows, out, _ = planned("build", "--machine", "h100:8", "--fit", "--train.rows", "128")
    assert status == 0
    assert {"zero2", "zero2, m 4", "zero2, m 16"} <= set(rows)
    assert "128 rows a step" in out
    assert "is the fastest that fits" in out


def test_pictures_and_the_compiler(planned, tmp_path):
    status, *_ = planned("build", "--machine", "cpu:8", "--out", "page")
    assert status == 0
    assert {"plan.png", "plan.html"} <= {path.name for path in (tmp_path / "page").iterdir()}
    status = command(["a_users_train:build", "--compile", "cpu:8"])
    assert status == 0


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("bad", [], r"bad returned a int: it must return \(step, params, batch, \*more\)"),
        ("fails", [], r"fails: .*a_users_train.py:\d+: KeyError: 'lost'"),
        ("builds", [], "has no builds; did you mean 'build'"),
        ("build", ["--model.layers", "3"], "--model.layers is for the reference model"),
        ("build", ["--machine", "h100:64x8"], "give a multiple of 512 rows"),
        ("with_tensor", ["--devices", "9"], "give a machine with a multiple of 2 devices"),
        (
            "build",
            ["--strategies", "hfsdp"],
            "hfsdp: available for this step and machine: ddp, zero1, zero2, zero3, own",
        ),
    ],
)
def test_what_is_wrong_is_named(planned, function, options, said):
    status, _, _, err = planned(function, *options)
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert re.search(said, err), err


def test_a_while_loop_counts_once_and_that_is_said(planned):
    _, _, out, _ = planned("loops_until_still", "--machine", "h100:8", "--strategies", "own")
    assert "A while loop counts as one iteration" in out
    assert "while loop" not in planned("build", "--machine", "h100:8", "--strategies", "own")[2]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("masters", [False, True])
def test_explicit_axes_are_read_as_auto_ones(strategy, masters):
    """`jax.make_mesh` makes Explicit axes by default; the program is the same."""
    found = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        options = {"master_dtype": "float32"} if masters else {}
        opt = getattr(jaxshard, strategy)(optax.adamw(1e-3), mesh, **options)
        dtype = jnp.bfloat16 if masters else jnp.float32
        params = {"a": jnp.zeros((256, 256), dtype), "b": jnp.zeros((256, 128), dtype)}
        step = jaxshard.train_step(lambda p, b: jnp.mean(jnp.tanh(b @ p["a"]) @ p["b"]), opt)
        batch = np.ones((32, 256), "f")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[kind] = plan.predict(step, params, batch)
        if not masters:  # XLA for CPU widens bfloat16
            placed = opt.place(params), opt.init(params), jaxshard.shard_batch(batch, opt)
            compiled = inspect.report(step.lower(*placed).compile())
            assert found[kind].wire_bytes == pytest.approx(compiled.wire_bytes, rel=0.01)
    assert found[AxisType.Explicit].costs == found[AxisType.Auto].costs


def _twice(x, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def test_kernels_count_by_the_cost_that_they_state():
    def with_kernel(**options):
        twice = jax.custom_vjp(lambda x: _twice(x, **options))
        twice.defvjp(lambda x: (twice(x), None), lambda _, g: (2 * g,))
        opt = jaxshard.zero2(optax.sgd(0.1), abstract_mesh(8, platform="tpu", device_kind="v5e"))
        step = jaxshard.train_step(lambda p, b: jnp.mean(twice(b @ p)), opt)
        return plan.predict(
            step, jax.ShapeDtypeStruct((128, 128), "float32"), jax.ShapeDtypeStruct((64, 128), "f")
        ).costs

    stated = with_kernel(cost_estimate=pl.CostEstimate(flops=10**9, transcendentals=0, bytes_accessed=8))
    silent = with_kernel(name="twice")
    assert sum(stated.flops.values()) - sum(silent.flops.values()) == 10**9
    assert (stated.uncounted, silent.uncounted) == ((), ("twice",))
