"""Options for XLA: ours exist and are told, a user's go through, unknown ones are named before anything is compiled."""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jaxshard
from jaxshard import platforms
from jaxshard.layout.options import STRATEGIES
from jaxshard.platforms import OURS
from jaxshard.platforms.gpu import SEVERAL_AT_ONCE, SMALL_GATHERS, SUMS_BEHIND, TWO_STEPS_IN_ONE

PAGE = Path(__file__).parents[2] / "docs" / "compiler_options.md"
PARAMS = {"w": np.ones((16, 8), np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def step_with(options, strategy="zero2"):
    opt = getattr(jaxshard, strategy)(optax.sgd(0.1), jaxshard.make_mesh(), min_shard_size=1)
    return opt, jaxshard.train_step(loss_fn, opt, compiler_options=options)


def run(options):
    opt, step = step_with(options)
    return step(opt.place(PARAMS), opt.init(PARAMS), jaxshard.shard_batch(np.ones((8, 16), np.float32), opt))


@pytest.mark.parametrize("option", OURS, ids=lambda option: option.name)
def test_ours_exist_in_this_jax(option):
    """XLA's options are one list for all platforms (those of TPU alone apart), so that a CPU program can name them."""
    assert not option.name.startswith("xla_tpu"), "name it to libtpu, and test that"
    jax.jit(lambda x: x + 1, compiler_options=dict([option.setting])).lower(0.0).compile()


def test_an_option_that_is_none_is_refused_so_that_the_test_above_can_fail():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_enable_wishes": True}).lower(0.0).compile()


def told(what, option, index):
    later = f" (from jax 0.11.1 on `{option.renamed[index]}`)" if option.renamed else ""
    return f"`{what}`{later}"


def test_the_page_lists_ours_with_their_reasons():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `xla")]
    want = [
        f"| {told(o.name, o, 0)} | {told(o.value, o, 1)} | {o.platform.upper()} | {o.where} | {o.reason} |"
        for o in OURS
    ]
    assert rows == want


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_each_platform_and_strategy_gets_its_own(platform, strategy):
    mesh = AbstractMesh((8,), ("data",), abstract_device=AbstractDevice(platform, None, platform=platform))
    opt = getattr(jaxshard, strategy)(optax.sgd(0.1), mesh)
    step = jaxshard.train_step(loss_fn, opt)
    of_params = [SMALL_GATHERS, SEVERAL_AT_ONCE] * STRATEGIES[strategy].params
    gpu = [TWO_STEPS_IN_ONE, *of_params, *[SUMS_BEHIND] * (strategy == "ddp")]
    want = dict(option.setting for option in gpu) if platform == "gpu" else {}
    assert step.compiler_options == want


def test_a_users_options_go_to_the_compiler_with_ours_and_win(monkeypatch):
    mesh = jaxshard.make_mesh(tensor=2)  # where ours is the scheduler
    opt = jaxshard.hybrid(optax.sgd(0.1), mesh, min_shard_size=1)
    given, plain = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda *a, **k: given.append(k.get("compiler_options")) or plain(*a, **k))
    arguments = (PARAMS, opt.init(PARAMS), jax.ShapeDtypeStruct((8, 16), jnp.float32))
    ours = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    for more in ({}, {"xla_cpu_enable_fast_math": False}, {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_DEFAULT"}):
        given.clear()
        with pytest.warns(UserWarning, match="do the same work"):
            jaxshard.train_step(loss_fn, opt, compiler_options=more).lower(*arguments)
        assert ours | more in given
    assert np.isfinite(float(run({"xla_cpu_enable_fast_math": np.bool_(False)})[2]["loss"]))


def test_an_unknown_option_is_named_with_platform_and_version():
    with pytest.raises(ValueError, match="xla_gpu_enable_wishes") as caught:
        run({"xla_cpu_enable_fast_math": True, "xla_gpu_enable_wishes": True})
    assert "CPU compiler" in str(caught.value)
    assert importlib.metadata.version("jax") in str(caught.value)


def test_a_value_that_fits_no_option_is_told():
    with pytest.raises(ValueError, match=r"xla_cpu_enable_fast_math.*perhaps"):
        run({"xla_cpu_enable_fast_math": "perhaps"})


@pytest.mark.parametrize(
    "options", [["xla_cpu_enable_fast_math"], "xla_cpu_enable_fast_math", {1: True}, {"xla_a": None}, {"xla_a": [1]}]
)
def test_what_is_no_mapping_of_names_to_values_is_refused(options):
    with pytest.raises(TypeError, match="compiler_options"):
        step_with(options)


def test_a_platform_that_is_not_known_gets_nothing_that_is_meant_for_another():
    found = platforms.named("metal")
    assert found == platforms.Platform("metal", platforms.CPU.rank_of_cut, platforms.CPU.tile)
    assert found.compiler_options == ()
