"""What a compiled program holds at its peak: in schedules written by hand, and by three compilers' real ones."""

import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard
from jaxshard import aot
from jaxshard.inspect.peak import peak

MB = 2**20


def program(body, *, header="", others=""):
    return (
        f"HloModule m, is_scheduled=true{header}\n\n{others}\nENTRY e (p: f32[262144]) -> f32[262144] {{\n{body}\n}}\n"
    )


def held(text):
    found = peak(text)
    return found.bytes, sorted(one.name for one in found.held)


def test_a_result_is_held_until_it_is_read_last():
    text = program(
        """  p = f32[262144]{0} parameter(0)
  a = f32[262144]{0} cosine(p)
  b = f32[262144]{0} sine(a)
  c = f32[262144]{0} cosine(b)
  ROOT d = f32[262144]{0} subtract(c, b)"""
    )
    assert held(text) == (4 * MB, ["b", "c", "d"])  # and the argument


def test_pointwise_results_and_donated_arguments_are_written_over():
    over = """  p = f32[262144]{0} parameter(0)
  a = f32[262144]{0} cosine(p)
  ROOT b = f32[262144]{0} add(a, a)"""
    assert held(program(over))[0] == 2 * MB
    donated = ", input_output_alias={ {}: (0, {}, may-alias) }"
    last = """  p = f32[262144]{0} parameter(0)
  ROOT b = f32[262144]{0} cosine(p)"""
    assert held(program(last, header=donated)) == (MB, [])
    assert held(program(last)) == (2 * MB, ["b"])


def test_updates_of_slices_views_and_loops_take_no_memory_of_their_own():
    loop = """body (c: (s32[], f32[262144])) -> (s32[], f32[262144]) {
  c = (s32[], f32[262144]{0}) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[262144]{0} get-tuple-element(c), index=1
  y = f32[262144]{0} cosine(x)
  z = f32[262144]{0} sine(y)
  ROOT r = (s32[], f32[262144]{0}) tuple(i, z)
}

condition (c: (s32[], f32[262144])) -> pred[] {
  c = (s32[], f32[262144]{0}) parameter(0)
  ROOT t = pred[] constant(true)
}
"""
    text = program(
        """  p = f32[262144]{0} parameter(0)
  zero = s32[] constant(0)
  a = f32[262144]{0} cosine(p)
  s = f32[1024]{0} slice(p), slice={[0:1024]}
  u = f32[262144]{0} dynamic-update-slice(a, s, zero)
  v = f32[512,512]{1,0} bitcast(u)
  w = f32[262144]{0} bitcast(v)
  t = (s32[], f32[262144]{0}) tuple(zero, w)
  l = (s32[], f32[262144]{0}) while(t), condition=condition, body=body
  ROOT o = f32[262144]{0} get-tuple-element(l), index=1""",
        others=loop,
    )
    assert held(text) == (3 * MB, ["a", "y"])  # the argument; the carry; what an iteration holds besides


def test_other_memories_and_tiles():
    text = program(
        """  p = f32[262144]{0} parameter(0)
  far = f32[262144]{0:S(5)} custom-call(p), custom_call_target="x"
  near = f32[262144]{0:T(1024)S(1)} custom-call(p), custom_call_target="x"
  ROOT padded = f32[1024,3]{1,0:T(8,128)} custom-call(far, near), custom_call_target="x\""""
    )
    assert held(text) == (MB + 4 * 1024 * 128, ["padded"])


def layer(w, x):
    return jnp.tanh(x @ jaxshard.unshard(w))  # kept


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return jnp.mean(x**2)


@pytest.mark.optimized
@pytest.mark.parametrize("machine", ["cpu:8", "v5e:2x4"])
def test_it_is_near_the_compilers_own_account(machine):
    width, rows = 2048, 4096
    mesh = jaxshard.make_mesh(devices=aot.devices(aot.machine(machine)))
    opt = jaxshard.zero3(optax.adamw(1e-3), mesh)
    params = opt.place([jax.ShapeDtypeStruct((width, width), jnp.float32)] * 6)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    compiled = jaxshard.train_step(loss, opt, donate=True).lower(params, opt.init(params), batch).compile()
    found, wanted = peak(compiled), jaxshard.inspect.report(compiled)
    assert found.argument_bytes == pytest.approx(wanted.argument_bytes, rel=0.01)
    assert found.bytes == pytest.approx(wanted.peak_bytes, rel=0.15)
    lines = {f"{frame.file.rpartition('/')[2]}:{frame.line}" for one in found.held for frame in one.stack}
    kept = next(i for i, line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if "# kept" in line)
    if machine == "cpu:8":
        assert f"test_peak.py:{kept}" in lines
        shapes = [one.shape for one in found.held]
        assert shapes.count(f"f32[{width},{width}]") >= 5  # the gathered params
