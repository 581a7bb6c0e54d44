# ruff: noqa: E501 - an instruction of HLO text is one line, however long
"""`jaxshard.inspect` against numbers worked out by hand, on programs compiled here and on HLO of other compilers.

The HLO texts are cut from what the compilers wrote: CPU and GPU of jax 0.10.2 and 0.12.0.1, libtpu 0.0.51 (v5e 2x4).
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import inspect

ALL = tuple(range(8))


def _mesh(**axes):
    assert len(jax.devices()) == 8
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def _compile(fn, mesh, in_specs, out_specs, *shapes, dtype=jnp.float32, **options):
    """Compiles `fn` in shard_map; `shapes` are those of the whole arrays."""
    specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(shapes)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs)
    return jax.jit(mapped, **options).lower(*args).compile()


def _vary(x, axis):
    return lax.pcast(x, axis, to="varying")


# Compiled here, on 8 CPU devices. Payload of one device: 8 x 1024 fp32 = 32768 bytes.


@pytest.mark.parametrize(
    ("fn", "out_spec", "kind", "payload", "wire"),
    [
        (lambda x: lax.psum(x, "data"), P(), "all-reduce", 32768, 2 * 7 / 8 * 32768),
        (
            lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
            P(None, "data"),
            "reduce-scatter",
            32768,
            7 / 8 * 32768,
        ),
        (
            lambda x: lax.all_gather(x * 2, "data", tiled=True, to="invarying"),
            P(),
            "all-gather",
            8 * 32768,
            7 * 32768,
        ),
        (
            lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
            P("data"),
            "collective-permute",
            32768,
            32768,
        ),
        (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), P("data"), "all-to-all", 32768, 7 / 8 * 32768),
    ],
)
def test_each_kind(fn, out_spec, kind, payload, wire):
    compiled = _compile(fn, _mesh(data=8), P("data"), out_spec, (64, 1024))
    (found,) = inspect.collectives(compiled)
    assert (found.kind, found.bytes, found.group_size, found.trips) == (kind, payload, 8, 1)
    assert (found.dtypes, found.dtype, found.trips_known) == (("f32",), "f32", True)
    assert found.replica_groups == (ALL,)
    assert found.op_name.startswith("jit(")
    assert found.wire_bytes == wire
    assert inspect.wire_bytes(compiled) == wire
    assert inspect.collectives(compiled.as_text()) == (found,)


@pytest.mark.parametrize("length", [2, 5, 11])
def test_a_collective_in_a_scan_counts_once_per_iteration(length):
    def fn(x):
        def body(carry, _):
            whole = lax.all_gather(jnp.sin(carry), "data", tiled=True)
            return carry + lax.psum_scatter(whole, "data", tiled=True), None

        return lax.scan(body, x, None, length=length)[0]

    found = inspect.collectives(_compile(fn, _mesh(data=8), P("data"), P("data"), (1024, 64)))
    whole = 1024 * 64 * 4
    assert sorted((c.kind, c.bytes, c.trips) for c in found) == [
        ("all-gather", whole, length),
        ("reduce-scatter", whole, length),
    ]
    assert [c.wire_bytes for c in found] == [length * 7 / 8 * whole] * 2


def test_nested_scans_multiply_and_axes_give_the_group_size():
    def fn(x):
        def inner(carry, _):
            return jnp.tanh(carry + _vary(lax.psum(carry, "tensor"), "tensor")), None

        def outer(carry, _):
            carry = lax.scan(inner, carry, None, length=3)[0]
            return carry + _vary(lax.psum(carry, "data"), "data"), None

        return lax.scan(outer, x, None, length=7)[0]

    mesh = _mesh(data=2, tensor=4)
    found = inspect.collectives(_compile(fn, mesh, P("data", "tensor"), P("data", "tensor"), (16, 64)))
    by_size = {c.group_size: c for c in found}
    assert len(found) == 2
    assert by_size[4].trips == 21
    assert by_size[4].replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert by_size[4].wire_bytes == 21 * 2 * 3 / 4 * (8 * 16 * 4)
    assert by_size[2].trips == 7
    assert by_size[2].replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert by_size[2].wire_bytes == 7 * 2 * 1 / 2 * (8 * 16 * 4)


def test_a_sum_over_both_axes_has_all_devices_in_one_group():
    mesh = _mesh(data=2, tensor=4)
    compiled = _compile(lambda x: lax.psum(x, ("data", "tensor")), mesh, P("data", "tensor"), P(), (16, 64))
    (found,) = inspect.collectives(compiled)
    assert found.replica_groups == (ALL,)
    assert found.wire_bytes == 2 * 7 / 8 * (8 * 16 * 4)


def test_bf16_is_counted_in_the_type_that_the_compiler_chose():
    # jax 0.10.2 and 0.12.0.1 widen a bf16 sum to fp32 on CPU. A permute keeps the type, or its bits.
    mesh = _mesh(data=8)
    (summed,) = inspect.collectives(
        _compile(lambda x: lax.psum(x, "data"), mesh, P("data"), P(), (64, 128), dtype=jnp.bfloat16)
    )
    assert (summed.dtype, summed.bytes) in {("f32", 8 * 128 * 4), ("bf16", 8 * 128 * 2)}
    ring = [(i, (i + 1) % 8) for i in range(8)]
    (sent,) = inspect.collectives(
        _compile(lambda x: lax.ppermute(x, "data", ring), mesh, P("data"), P("data"), (64, 128), dtype=jnp.bfloat16)
    )
    assert sent.bytes in (8 * 128 * 2, 8 * 128 * 4)
    assert sent.bytes == 8 * 128 * {"bf16": 2, "u16": 2, "f32": 4}[sent.dtype]


def test_combined_sums_add_up_however_many_the_compiler_makes_of_them():
    compiled = _compile(lambda a, b: lax.psum((a, b), "data"), _mesh(data=8), P("data"), P(), (8, 300), (16, 100))
    assert "all-reduce(" in compiled.as_text()
    assert inspect.wire_bytes(compiled) == 2 * 7 / 8 * (300 + 2 * 100) * 4


def test_a_loop_without_a_trip_count_counts_once_and_says_so():
    def fn(x):
        def body(carry):
            return _vary(lax.psum(carry, "data"), "data") * 1.5

        return lax.while_loop(lambda carry: lax.psum(carry.sum(), "data") < 100, body, x)

    compiled = _compile(fn, _mesh(data=8), P("data"), P("data"), (64, 16))
    found = inspect.collectives(compiled)
    assert sorted((c.bytes, c.trips, c.trips_known) for c in found) == [(4, 1, False), (8 * 16 * 4, 1, False)]
    report = inspect.report(compiled)
    assert not report.trips_known
    assert "unknown trip count" in str(report)


def test_every_branch_of_a_conditional_is_counted():
    def fn(x):
        return lax.cond(
            lax.psum(x.sum(), "data") > 0,
            lambda y: lax.psum(y, "data"),
            lambda y: lax.psum(jnp.sin(y), "data") * 2 + lax.pmax(y, "data"),
            x,
        )

    found = inspect.collectives(_compile(fn, _mesh(data=8), P("data"), P(), (64, 16)))
    assert sorted(c.bytes for c in found) == [4, 512, 512, 512]


def test_report_reads_memory_and_prints_a_table():
    mesh = _mesh(data=8)
    compiled = _compile(
        lambda x: (x + 1, lax.psum(x, "data")), mesh, P("data"), (P("data"), P()), (64, 1024), donate_argnums=0
    )
    report = inspect.report(compiled)
    assert report.collectives == inspect.collectives(compiled)
    assert report.wire_bytes == 2 * 7 / 8 * 32768
    assert report.argument_bytes == 32768
    assert report.alias_bytes == 32768
    assert 2 * 32768 <= report.output_bytes <= 2 * 32768 + 64  # the table of the tuple's pointers comes on top
    assert report.peak_bytes == report.output_bytes + report.temp_bytes
    lines = str(report).splitlines()
    assert lines[0].split() == ["collective", "group", "dtype", "count", "executions", "bytes", "wire", "bytes"]
    assert lines[1].split() == ["all-reduce", "8", "f32", "1", "1", "32,768", "57,344"]
    assert "wire bytes sent per device and step  57,344" in lines
    assert "unknown trip count" not in str(report)


def test_report_becomes_json():
    report = inspect.report(_compile(lambda x: lax.psum(x, "data"), _mesh(data=8), P("data"), P(), (64, 1024)))
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["wire_bytes"] == plain["collectives"][0]["wire_bytes"] == 57344
    assert plain["collectives"][0]["replica_groups"] == [list(ALL)]
    assert plain["peak_bytes"] == report.peak_bytes


def test_a_program_on_one_device_sends_nothing():
    report = inspect.report(jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile())
    assert report.collectives == ()
    assert report.wire_bytes == 0
    assert str(report).splitlines()[0].startswith("collective")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "got int"),
        (None, "got NoneType"),
        ("module @jit_f { func.func public @main() }", "got 'module @jit_f"),
        ("HloModule m, num_partitions=8\n", "got 'HloModule m"),
    ],
)
def test_other_things_are_refused_with_what_is_needed(given, says):
    for read in (inspect.collectives, inspect.wire_bytes, inspect.report):
        with pytest.raises(TypeError, match="compiled program") as caught:
            read(given)
        assert says in str(caught.value)


def test_a_lowered_program_is_refused_with_the_cure():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for read in (inspect.collectives, inspect.report):
        with pytest.raises(TypeError, match=r"got Lowered: call `\.compile\(\)` on it first"):
            read(lowered)


# HLO text of other compilers.


def _hlo(entry, *computations, header="num_partitions=8"):
    """HLO text with the given lines in its entry computation."""
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return "\n\n".join(
        [
            f"HloModule jit_step, is_scheduled=true, {header}",
            *computations,
            f"ENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}",
        ]
    )


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}"""


def _one(text):
    (found,) = inspect.collectives(text)
    return found


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (ALL,)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=8] {'data'}", (ALL,)),
        ("mesh['data'=4,'tensor'=2] {'data'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['data'=4,'tensor'=2] {'tensor'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['data'=2,'tensor'=4] {'data','tensor'}", (ALL,)),
        ("mesh['data'=2,'tensor'=4] {'tensor','data'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", (ALL,)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_1'}", tuple((i,) for i in ALL)),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'x','y':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh[x=4,y=2], device_ids=([2,4]T(1,0)) {y}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=4,'y'=2], device_ids=(7,6,5,4,3,2,1,0) {'y'}", ((7, 6), (5, 4), (3, 2), (1, 0))),
    ],
)
def test_replica_groups_in_every_form(written, groups):
    entry = f"""%p = f32[256]{{0}} parameter(0)
    ROOT %r = f32[256]{{0}} all-reduce(%p), channel_id=1, replica_groups={written}, use_global_device_ids=true, to_apply=%add"""
    found = _one(_hlo(entry, ADD))
    size = len(groups[0])
    assert found.replica_groups == groups
    assert found.group_size == size
    assert found.wire_bytes == 2 * (size - 1) / size * 1024


def test_replicas_and_partitions_both_count_as_devices():
    entry = """%p = f32[256]{0} parameter(0)
    ROOT %r = f32[256]{0} all-reduce(%p), replica_groups={}, to_apply=%add"""
    assert _one(_hlo(entry, ADD, header="replica_count=4")).replica_groups == ((0, 1, 2, 3),)
    assert _one(_hlo(entry, ADD, header="replica_count=2, num_partitions=4")).replica_groups == (ALL,)


def test_a_group_of_one_sends_nothing():
    entry = """%p = f32[256]{0} parameter(0)
    ROOT %r = f32[256]{0} all-reduce(%p), channel_id=1, replica_groups=[8,1]<=[8], to_apply=%add"""
    found = _one(_hlo(entry, ADD))
    assert (found.bytes, found.group_size, found.wire_bytes) == (1024, 1, 0)


def test_an_unknown_form_of_groups_is_an_error():
    entry = """%p = f32[256]{0} parameter(0)
    ROOT %r = f32[256]{0} all-reduce(%p), replica_groups=<<odd>>, to_apply=%add"""
    with pytest.raises(ValueError, match=r"Unknown form of replica groups in r: replica_groups=<<odd>>"):
        inspect.collectives(_hlo(entry, ADD))


def test_incomplete_text_is_an_error():
    with pytest.raises(ValueError, match=r"r takes \['gone'\], not defined in main"):
        inspect.collectives(_hlo("ROOT %r = f32[8]{0} all-reduce(%gone), replica_groups={}, to_apply=%add", ADD))
    with pytest.raises(ValueError, match="computation gone is not defined"):
        inspect.collectives(_loop(LESS_THAN_6).replace("condition=%cond", "condition=%gone"))
    with pytest.raises(ValueError, match="computation gone is not defined"):
        inspect.collectives(_hlo("ROOT %r = f32[8]{0} fusion(), kind=kLoop, calls=%gone"))


# The GPU compiler's starts return operands and results, in jax 0.10.2 and, more deeply nested, in 0.12.
GPU_STARTS = [
    (
        """%p = f32[8,256]{1,0} parameter(0)
        %all-gather-start = (f32[8,256]{1,0}, f32[16,256]{1,0}) all-gather-start(%p), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, use_global_device_ids=true
        ROOT %all-gather-done = f32[16,256]{1,0} all-gather-done(%all-gather-start)""",
        ("all-gather", 16 * 256 * 4, 2, 1 / 2 * 16 * 256 * 4),
    ),
    (
        """%p = f32[8,256]{1,0} parameter(0)
        %all-gather-start = ((f32[8,256]{1,0}), f32[64,256]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}, dimensions={0}, use_global_device_ids=true
        ROOT %all-gather-done = f32[64,256]{1,0} all-gather-done(%all-gather-start)""",
        ("all-gather", 64 * 256 * 4, 8, 7 / 8 * 64 * 256 * 4),
    ),
    (
        """%p = f32[8,1024]{1,0} parameter(0)
        %all-reduce-start = f32[8,1024]{1,0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
        ROOT %all-reduce-done = f32[8,1024]{1,0} all-reduce-done(%all-reduce-start)""",
        ("all-reduce", 32768, 8, 2 * 7 / 8 * 32768),
    ),
    (
        """%p = f32[8,1024]{1,0} parameter(0)
        %all-reduce-start = ((f32[8,1024]{1,0}), f32[8,1024]{1,0}) all-reduce-start(%p), channel_id=1, replica_groups=mesh['data'=8] {'data'}, use_global_device_ids=true, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}
        ROOT %all-reduce-done = f32[8,1024]{1,0} all-reduce-done(%all-reduce-start)""",
        ("all-reduce", 32768, 8, 2 * 7 / 8 * 32768),
    ),
    (
        """%a = f32[1000,32]{1,0} parameter(0)
        %b = f32[8000,1024]{1,0} parameter(1)
        %reduce-scatter-start.1 = ((f32[1000,32]{1,0}, f32[8000,1024]{1,0}), (f32[125,32]{1,0}, f32[1000,1024]{1,0})) reduce-scatter-start(%a, %b), channel_id=1, replica_groups=mesh['data'=8] {'data'}, use_global_device_ids=true, dimensions={0}, to_apply=%add
        ROOT %reduce-scatter-done.1 = (f32[125,32]{1,0}, f32[1000,1024]{1,0}) reduce-scatter-done(%reduce-scatter-start.1)""",
        ("reduce-scatter", (1000 * 32 + 8000 * 1024) * 4, 8, 7 / 8 * (1000 * 32 + 8000 * 1024) * 4),
    ),
    (
        """%p = f32[8,1024]{0,1} parameter(0)
        %all-to-all-start = ((f32[8,1024]{0,1}), f32[8,1024]{0,1}) all-to-all-start(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
        ROOT %all-to-all-done = f32[8,1024]{0,1} all-to-all-done(%all-to-all-start)""",
        ("all-to-all", 32768, 8, 7 / 8 * 32768),
    ),
    (
        """%p = bf16[8,1024]{1,0} parameter(0)
        %collective-permute-start = ((bf16[8,1024]{1,0}), bf16[8,1024]{1,0}) collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
        ROOT %collective-permute-done = bf16[8,1024]{1,0} collective-permute-done(%collective-permute-start)""",
        ("collective-permute", 16384, 8, 16384),
    ),
    (
        """%p = f32[8,128]{1,0} parameter(0)
        %out = f32[8,128]{1,0} parameter(1)
        %n = s64[8]{0} parameter(2)
        %ragged-all-to-all-start = ((f32[8,128]{1,0}, f32[8,128]{1,0}, s64[8]{0}, s64[8]{0}, s64[8]{0}, /*index=5*/s64[8]{0}), f32[8,128]{1,0}) ragged-all-to-all-start(%p, %out, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
        ROOT %ragged-all-to-all-done = f32[8,128]{1,0} ragged-all-to-all-done(%ragged-all-to-all-start)""",
        ("ragged-all-to-all", 4096, 8, 7 / 8 * 4096),
    ),
    (
        """%p = f32[256]{0} parameter(0)
        ROOT %b = f32[256]{0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}""",
        ("collective-broadcast", 1024, 4, 3 / 4 * 1024),
    ),
]


@pytest.mark.parametrize(("entry", "expected"), GPU_STARTS)
def test_a_start_and_its_done_count_once(entry, expected):
    found = _one(_hlo(entry, ADD))
    assert (found.kind, found.bytes, found.group_size, found.wire_bytes) == expected


def test_variadic_sums_and_all_to_alls_add_up_their_operands():
    # CPU: an all-to-all of 8 pieces, and a sum of two arrays of different types.
    pieces = ", ".join(f"%s.{i}" if i != 5 else "/*index=5*/%s.5" for i in range(8))
    entry = "\n".join(f"%s.{i} = f32[8,128]{{1,0}} parameter({i})" for i in range(8))
    entry += f"""
    %h = bf16[1,100]{{1,0}} parameter(8)
    %a2a = ({", ".join(["f32[8,128]{1,0}"] * 8)}) all-to-all({pieces}), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}
    ROOT %sum = (f32[8,128]{{1,0}}, bf16[1,100]{{1,0}}) all-reduce(%s.0, %h), channel_id=2, replica_groups={{}}, to_apply=%add"""
    moved, summed = inspect.collectives(_hlo(entry, ADD))
    assert (moved.bytes, moved.wire_bytes) == (32768, 7 / 8 * 32768)
    assert (summed.bytes, summed.dtype) == (4096 + 200, "f32+bf16")


def test_a_sum_wider_than_its_operands_moves_partial_sums():
    # TPU v5p: the compiler leaves a cast before the sum to the sum itself.
    entry = """%g = bf16[128,64]{1,0} parameter(0)
    ROOT %sum = f32[128,64]{1,0} all-reduce(%g), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"""
    found = _one(_hlo(entry, ADD))
    assert (found.bytes, found.dtypes) == (128 * 64 * 4, ("f32",))


@pytest.mark.parametrize(
    ("shape", "size"),
    [("pred[3]", 3), ("s4[5]", 3), ("f8e4m3fn[8]", 8), ("c64[2]", 16), ("u32[]", 4), ("f64[2,3]", 48)],
)
def test_bytes_of_element_types(shape, size):
    entry = f"""%p = {shape} parameter(0)
    ROOT %r = {shape} collective-permute(%p), source_target_pairs={{{{0,1}}}}"""
    assert _one(_hlo(entry)).bytes == size


def test_operands_may_carry_their_shapes():
    entry = """p = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
    ROOT r = f32[8,128]{1,0:T(8,128)} all-reduce(f32[8,128]{1,0:T(8,128)S(1)} p), replica_groups={}, to_apply=%add"""
    assert _one(_hlo(entry, ADD)).bytes == 4096


@pytest.mark.parametrize(
    ("pairs", "groups", "wire"),
    [
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7}}", (ALL,), 1024),
        ("{{0,1},{1,0},{2,3},{3,2}}", ((0, 1), (2, 3)), 1024),
        ("{{0,0},{1,4},{2,1},{3,5},{4,2},{5,6},{6,3},{7,7}}", ((0,), (1, 2, 4), (3, 5, 6), (7,)), 1024),
        ("{{0,0},{1,1}}", ((0,), (1,)), 0),
    ],
)
def test_permutes_link_devices(pairs, groups, wire):
    entry = f"""%p = f32[256]{{0}} parameter(0)
    ROOT %r = f32[256]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}"""
    found = _one(_hlo(entry))
    assert found.replica_groups == groups
    assert found.wire_bytes == wire


def test_a_permute_of_slices_sends_only_the_slices():
    entry = """%p = f32[64,128]{1,0} parameter(0)
    %out = f32[64,128]{1,0} parameter(1)
    %at = (s32[], s32[]) parameter(2)
    ROOT %r = f32[64,128]{1,0} collective-permute(%p, %out, %at, %at), source_target_pairs={{0,1},{1,0}}, slice_sizes={{8,128}}"""
    assert _one(_hlo(entry)).bytes == 8 * 128 * 4


def test_conditionals_calls_and_async_wrappers_are_entered_once():
    def branch(name, kind="all-reduce"):
        return f"""%{name} (q.{name}: f32[256]) -> f32[256] {{
  %q.{name} = f32[256]{{0}} parameter(0)
  ROOT %r.{name} = f32[256]{{0}} {kind}(%q.{name}), replica_groups={{}}, to_apply=%add
}}"""

    entry = """%p = f32[256]{0} parameter(0)
    %i = s32[] parameter(1)
    %c = f32[256]{0} conditional(%i, %p, %p), branch_computations={%zero, %one}
    %d = f32[256]{0} conditional(%i, %p, %p), true_computation=%yes, false_computation=%no
    %e = f32[256]{0} call(%d), to_apply=%called
    %async = ((f32[256]{0}), f32[2048]{0}, u32[]{:S(2)}) async-start(%e), async_execution_thread="sparsecore", calls=%wrapped
    %more = ((f32[256]{0}), f32[2048]{0}, u32[]{:S(2)}) async-update(%async), calls=%wrapped
    ROOT %done = f32[2048]{0} async-done(%more), calls=%wrapped"""
    names = ["zero", "one", "yes", "no", "called"]
    found = inspect.collectives(_hlo(entry, ADD, *map(branch, names), branch("wrapped", "all-gather")))
    assert [c.name for c in found] == [f"r.{name}" for name in [*names, "wrapped"]]
    assert found[-1].bytes == 8 * 1024


def _loop(condition, start="0", step="add(%i, %k)", attributes="", extra=""):
    """A while loop over an all-reduce of 1 KiB; its counter is element 1 of the carry, and the step is 1."""
    body = f"""%body (carry: (f32[256], s32[])) -> (f32[256], s32[]) {{
  %carry = (f32[256]{{0:T(256)}}, s32[]{{:T(128)}}) parameter(0)
  %k = s32[]{{:T(128)}} constant(1)
  %i = s32[]{{:T(128)}} get-tuple-element(%carry), index=1
  %next = s32[]{{:T(128)}} {step}
  %x = f32[256]{{0:T(256)}} get-tuple-element(%carry), index=0
  %r = f32[256]{{0:T(256)}} all-reduce(%x), channel_id=1, replica_groups={{}}, to_apply=%add
  ROOT %tuple.1 = (f32[256]{{0:T(256)}}, s32[]{{:T(128)}}) tuple(%r, %next)
}}"""
    test = f"""%cond (carry.1: (f32[256], s32[])) -> pred[] {{
  %carry.1 = (f32[256]{{0:T(256)}}, s32[]{{:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%carry.1), index=1
{condition}
}}"""
    entry = f"""%p = f32[256]{{0:T(256)}} parameter(0)
    %zero = s32[]{{:T(128)}} constant({start})
    %start = s32[]{{:T(128)}} copy(%zero)
    %tuple = (f32[256]{{0:T(256)}}, s32[]{{:T(128)}}) tuple(%p, %start)
    %while = (f32[256]{{0:T(256)}}, s32[]{{:T(128)}}) while(%tuple), condition=%cond, body=%body{attributes}
    ROOT %out = f32[256]{{0:T(256)}} get-tuple-element(%while), index=0"""
    return _hlo(entry, ADD, *([extra] if extra else []), body, test)


LESS_THAN_6 = """  %n = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT"""


def test_the_named_trip_count_wins():
    # CPU and GPU name it, and may have rewritten the condition since.
    named = ', backend_config={"known_induction_variable":{"tuple_index":"1"},"known_trip_count":{"n":"9"}}'
    assert _one(_loop(LESS_THAN_6, attributes=named)).trips == 9


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (_loop(LESS_THAN_6), 6),
        (_loop(LESS_THAN_6.replace("s32", "u32")), 6),
        (_loop(LESS_THAN_6, start="2"), 4),
        (_loop(LESS_THAN_6, start="9"), 0),
        (_loop(LESS_THAN_6.replace("LT", "LE")), 7),
        (_loop(LESS_THAN_6.replace("LT", "NE")), 6),
        (_loop(LESS_THAN_6.replace("(%j, %n), direction=LT", "(%n, %j), direction=GT")), 6),
        (_loop(LESS_THAN_6.replace("LT", "GT"), start="10", step="subtract(%i, %k)"), 4),
        (_loop(LESS_THAN_6, step="add(%k, %i)").replace("constant(1)", "constant(4)"), 2),
    ],
)
def test_trips_from_the_condition(loop, trips):
    # TPU: no name, so from the counter's start, its step, and the constant that it is compared with.
    found = _one(loop)
    assert (found.trips, found.trips_known) == (trips, True)
    assert found.wire_bytes == trips * 2 * 7 / 8 * 1024


def test_trips_when_the_comparison_is_in_a_fusion():
    fused = """%fused (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt.1 = pred[] compare(%b, %a), direction=LT
}"""
    condition = """  %n = s32[] constant(12)
  ROOT %f = pred[] fusion(%n, %j), kind=kLoop, calls=%fused"""
    assert _one(_loop(condition, extra=fused)).trips == 12


@pytest.mark.parametrize(
    "loop",
    [
        _loop(LESS_THAN_6, step="multiply(%i, %k)"),
        _loop(LESS_THAN_6.replace("constant(6)", "get-tuple-element(%carry.1), index=0")),
        _loop(LESS_THAN_6, start="{...}"),
        _loop(LESS_THAN_6, step="add(%x, %k)"),
    ],
    ids=["step", "limit", "start", "step of another element"],
)
def test_trips_that_cannot_be_read(loop):
    found = _one(loop)
    assert (found.trips, found.trips_known) == (1, False)


def test_a_collective_in_the_condition_runs_once_more():
    condition = """  %y = f32[256]{0} get-tuple-element(%carry.1), index=0
  %norm = f32[256]{0} all-reduce(%y), replica_groups={}, to_apply=%add
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%j, %n), direction=LT"""
    assert {c.name: c.trips for c in inspect.collectives(_loop(condition))} == {"norm": 7, "r": 6}


# TPU v5e: a sum whose every device keeps its slice is a reduce-scatter, whatever it is called.
TPU_ALL_REDUCE_SCATTER = """%all-reduce-scatter.3.clone.1 (input_0.2: bf16[1024,768], input_1.2: bf16[1024,1024]) -> (bf16[512,768], bf16[512,1024]) {
  %input_0.2 = bf16[1024,768]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %input_1.2 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-reduce.20 = (bf16[1024,768]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) all-reduce(%input_0.2, %input_1.2), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%add
  %get-tuple-element.1206 = bf16[1024,768]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.20), index=0
  %constant.shard_id_table.7 = u32[8]{0:T(128)} constant({0, 0, 0, 0, 1, 1, 1, 1})
  ROOT %tuple.9 = (bf16[512,768]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}) tuple(%get-tuple-element.1206, %get-tuple-element.1206)
}"""


def test_tpu_all_reduce_scatter_is_a_reduce_scatter():
    entry = """%a = bf16[1024,768]{1,0:T(8,128)(2,1)S(1)} parameter(0)
    %b = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
    %other = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} all-reduce(%b), replica_groups=[2,4]<=[8], to_apply=%add
    ROOT %fusion.194 = (bf16[512,768]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.3.clone.1"""
    plain, scattered = inspect.collectives(_hlo(entry, ADD, TPU_ALL_REDUCE_SCATTER))
    assert plain.kind == "all-reduce"
    payload = 1024 * (768 + 1024) * 2
    assert (scattered.kind, scattered.bytes, scattered.group_size) == ("reduce-scatter", payload, 2)
    assert scattered.wire_bytes == 1 / 2 * payload


# TPU v5e: one all-gather, begun in one fusion, advanced in a second beside a matmul, ended in a third.
TPU_GATHER = 'all-gather({}), channel_id=8, replica_groups=mesh[\'axis_0\'=8] {{\'axis_0\'}}, dimensions={{2}}, use_global_device_ids=true, frontend_attributes={{chain_id="0"}}, metadata={{op_name="jit(gstep)/while/body/squeeze" stack_frame_id=12}}, backend_config={{"flag_configs":[],"async_collective_fusion_config":{{"flag_start":"{}","flag_end":"8"}}}}'
TPU_ASYNC = f"""%fused_computation.19 (param_0.61: bf16[1,1024,128]) -> (bf16[1,1024,128], bf16[1,1024,1024], s32[2], u32[]) {{
  %param_0.61 = bf16[1,1024,128]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %all-gather.19 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} {TPU_GATHER.format("%param_0.61", -1)}
  ROOT %custom-call.4 = (bf16[1,1024,128]{{2,1,0:T(8,128)(2,1)S(1)}}, bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)S(1)}}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) custom-call(%all-gather.19), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.24 (param_0.66: bf16[1,1024,128], param_9.2: bf16[8,1024]) -> bf16[1,1024,1024] {{
  %param_0.66 = bf16[1,1024,128]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %all-gather.21 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)S(1)}} {TPU_GATHER.format("%param_0.66", 2)}
}}

%fused_computation.21 (param_0.69: bf16[1,1024,128], param_1.66: bf16[1,1024,1024]) -> bf16[1,1024,1024] {{
  %param_0.69 = bf16[1,1024,128]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %param_1.66 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(1)
  %all-gather.23 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} {TPU_GATHER.format("%param_0.69", 2)}
  ROOT %custom-call.6 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)S(1)}} custom-call(%param_0.69, %param_1.66, %all-gather.23), custom_call_target="AsyncCollectiveDone"
}}"""


def test_tpu_async_fusions_repeat_a_collective_that_counts_once():
    entry = """%p = bf16[1,1024,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
    %async-collective-start = (bf16[1,1024,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) fusion(%p), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.19
    %fusion.24 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} fusion(%p, %p), kind=kOutput, calls=%async_collective_fusion.24
    ROOT %async-collective-done = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} fusion(%p, %fusion.24), kind=kCustom, calls=%fused_computation.21"""
    found = _one(_hlo(entry, TPU_ASYNC))
    assert (found.name, found.kind, found.bytes) == ("all-gather.19", "all-gather", 1024 * 1024 * 2)
    assert found.op_name == "jit(gstep)/while/body/squeeze"


# TPU v5e, two scans one in the other (7 and 3 iterations); constants are sunk into the bodies, and nothing is named.
TPU_NESTED = """%inner_body (w.5: (s32[], f32[512,256], s32[])) -> (s32[], f32[512,256], s32[]) {
  %constant.2.sunk = s32[]{:T(128)} constant(1)
  %w.5 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.71 = s32[]{:T(128)} get-tuple-element(%w.5), index=0
  %add.24 = s32[]{:T(128)} add(%get-tuple-element.71, %constant.2.sunk)
  %get-tuple-element.76 = s32[]{:T(128)} get-tuple-element(%w.5), index=2
  %get-tuple-element.72 = f32[512,256]{1,0:T(8,128)S(1)} get-tuple-element(%w.5), index=1
  %psum_invariant.17 = f32[512,256]{1,0:T(8,128)S(1)} all-reduce(%get-tuple-element.72), channel_id=1, replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, use_global_device_ids=true, to_apply=%add
  ROOT %tuple.33 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%add.24, %psum_invariant.17, %get-tuple-element.76)
}

%inner_cond (w.1: (s32[], f32[512,256], s32[])) -> pred[] {
  %constant.1.clone.1 = s32[]{:T(128)} constant(3)
  %w.1 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.39 = s32[]{:T(128)} get-tuple-element(%w.1), index=0
  ROOT %lt.6 = pred[]{:T(512)} compare(%get-tuple-element.39, %constant.1.clone.1), direction=LT
}

%outer_body (w.4: (s32[], f32[512,256], s32[])) -> (s32[], f32[512,256], s32[]) {
  %constant.9.sunk = s32[]{:T(128)} constant(0)
  %constant.2.sunk.1 = s32[]{:T(128)} constant(1)
  %w.4 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %copy.17 = s32[]{:T(128)} copy(%constant.9.sunk)
  %get-tuple-element.82 = s32[]{:T(128)} get-tuple-element(%w.4), index=0
  %add.21 = s32[]{:T(128)} add(%get-tuple-element.82, %constant.2.sunk.1)
  %get-tuple-element.83 = f32[512,256]{1,0:T(8,128)S(1)} get-tuple-element(%w.4), index=1
  %tuple.31 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%copy.17, %get-tuple-element.83, %constant.2.sunk.1)
  %while.22 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) while(%tuple.31), condition=%inner_cond, body=%inner_body
  %get-tuple-element.64 = f32[512,256]{1,0:T(8,128)S(1)} get-tuple-element(%while.22), index=1
  %psum_invariant.16 = f32[512,256]{1,0:T(8,128)S(1)} all-reduce(%get-tuple-element.64), channel_id=1, replica_groups=mesh['data'=2,'tensor'=4] {'data'}, use_global_device_ids=true, to_apply=%add
  ROOT %tuple.36 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%add.21, %psum_invariant.16, %constant.9.sunk)
}

%outer_cond (w.3: (s32[], f32[512,256], s32[])) -> pred[] {
  %constant.5.clone.1 = s32[]{:T(128)} constant(7)
  %w.3 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.48 = s32[]{:T(128)} get-tuple-element(%w.3), index=0
  ROOT %lt.7 = pred[]{:T(512)} compare(%get-tuple-element.48, %constant.5.clone.1), direction=LT
}"""


def test_tpu_nested_scans():
    entry = """%constant.9 = s32[]{:T(128)} constant(0)
    %p = f32[512,256]{1,0:T(8,128)} parameter(0)
    %copy.8 = s32[]{:T(128)} copy(%constant.9)
    %tuple.38 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%copy.8, %p, %constant.9)
    %while.21 = (s32[]{:T(128)}, f32[512,256]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) while(%tuple.38), condition=%outer_cond, body=%outer_body
    ROOT %out = f32[512,256]{1,0:T(8,128)S(1)} get-tuple-element(%while.21), index=1"""
    found = inspect.collectives(_hlo(entry, ADD, TPU_NESTED))
    assert [(c.group_size, c.trips, c.trips_known) for c in found] == [(4, 21, True), (2, 7, True)]
    payload = 512 * 256 * 4
    assert inspect.wire_bytes(_hlo(entry, ADD, TPU_NESTED)) == 21 * 2 * 3 / 4 * payload + 7 * 2 * 1 / 2 * payload


# What overlaps: the compute that the schedule places between a start and its done.

OVERLAP = {
    "a pair": (
        """%p = f32[8,256]{1,0} parameter(0)
        %i = s32[] parameter(1)
        %before = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        %start = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
        %counter = s32[] fusion(%i), kind=kLoop, calls=%fused
        %copied = f32[8,256]{1,0} copy(%p)
        %cast = f32[256,8]{0,1} bitcast(%p)
        %summed = f32[8,256]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add
        %room = f32[8,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"
        %product = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
        %norm = f32[] reduce(%p, %p), dimensions={0,1}, to_apply=%add
        %gathered = f32[64,256]{1,0} all-gather-done(%start)
        ROOT %after = f32[64,256]{1,0} fusion(%gathered), kind=kLoop, calls=%fused""",
        {"start": ("product", "norm"), "summed": None},
    ),
    "a sum of another kind between": (
        """%p = f32[8,256]{1,0} parameter(0)
        %start = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
        %summed = f32[1,256]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
        ROOT %gathered = f32[64,256]{1,0} all-gather-done(%start)""",
        {"start": (), "part": None},
    ),
    "two at a time": (
        """%p = f32[8,256]{1,0} parameter(0)
        %one = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
        %a = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        %two = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
        %b = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        %done.1 = f32[64,256]{1,0} all-gather-done(%one)
        %c = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        ROOT %done.2 = f32[64,256]{1,0} all-gather-done(%two)""",
        {"one": ("a", "b"), "two": ("b", "c")},
    ),
    "nothing between": (
        """%p = f32[8,256]{1,0} parameter(0)
        %start = f32[8,256]{1,0} all-reduce-start(%p), replica_groups={}, to_apply=%add
        %done = f32[8,256]{1,0} all-reduce-done(%start)
        ROOT %after = f32[8,256]{1,0} fusion(%done), kind=kLoop, calls=%fused""",
        {"start": ()},
    ),
    "a pair that the GPU compiler runs at once": (
        """%p = f32[8,256]{1,0} parameter(0)
        %start = f32[8,256]{1,0} all-reduce-start(%p), replica_groups={}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
        %between = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        ROOT %done = f32[8,256]{1,0} all-reduce-done(%start)""",
        {"start": None},
    ),
    "a wrapped one, with an update": (
        """%p = f32[8,256]{1,0} parameter(0)
        %async = ((f32[8,256]{1,0}), f32[1,256]{1,0}, u32[]{:S(2)}) async-start(%p), calls=%wrapped
        %a = f32[8,256]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
        %more = ((f32[8,256]{1,0}), f32[1,256]{1,0}, u32[]{:S(2)}) async-update(%async), calls=%wrapped
        %b = f32[8,256]{1,0} fusion(%p), kind=kLoop, calls=%fused
        %done = f32[1,256]{1,0} async-done(%more), calls=%wrapped
        ROOT %after = f32[1,256]{1,0} fusion(%done), kind=kLoop, calls=%fused""",
        {"scattered": ("a", "b")},
    ),
}
WRAPPED = """%wrapped (q: f32[8,256]) -> f32[1,256] {
  %q = f32[8,256]{1,0} parameter(0)
  ROOT %scattered = f32[1,256]{1,0} reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%add
}"""
SCATTER = """%all-reduce-scatter (r: f32[8,256]) -> f32[1,256] {
  %r = f32[8,256]{1,0} parameter(0)
  %part = f32[8,256]{1,0} all-reduce(%r), replica_groups={}, to_apply=%add
  ROOT %slice = f32[1,256]{1,0} fusion(%part), kind=kLoop, calls=%fused
}"""
FUSED = """%fused (f: f32[8,256]) -> f32[8,256] {
  %f = f32[8,256]{1,0} parameter(0)
  ROOT %negated = f32[8,256]{1,0} negate(%f)
}"""


@pytest.mark.parametrize("case", OVERLAP)
def test_compute_between_a_start_and_its_done_overlaps(case):
    entry, expected = OVERLAP[case]
    found = inspect.collectives(_hlo(entry, ADD, FUSED, WRAPPED, SCATTER))
    assert {c.name: c.overlapped for c in found} == expected


# TPU v5e: as above, and uncut where the operation is handed on: in the fusion that advances it, a convolution.
TPU_CHAIN = 'replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, frontend_attributes={{chain_id="{}"}}, backend_config={{"flag_configs":[],"async_collective_fusion_config":{{"flag_start":"-1","flag_end":"8"}}}}'


def _tpu_chain(n):
    gather, chain = f"bf16[512,256]{{1,0}} all-gather(%q.{n})", f"channel_id=1, {TPU_CHAIN.format(n)}"
    return f"""%begin.{n} (q.{n}: bf16[64,256]) -> (bf16[64,256], bf16[512,256]) {{
  %q.{n} = bf16[64,256]{{1,0}} parameter(0)
  %all-gather.1{n} = {gather}, {chain}
  ROOT %custom-call.1{n} = (bf16[64,256]{{1,0}}, bf16[512,256]{{1,0}}) custom-call(%all-gather.1{n}), custom_call_target="AsyncCollectiveStart"
}}

%advance.{n} (q.{n}: bf16[64,256], w.{n}: bf16[64,256]) -> (bf16[64,256], bf16[64,256]) {{
  %q.{n} = bf16[64,256]{{1,0}} parameter(0)
  %w.{n} = bf16[64,256]{{1,0}} parameter(1)
  %all-gather.2{n} = {gather}, {chain}
  %convolution.{n} = bf16[64,256]{{1,0}} convolution(%w.{n}, %w.{n}), dim_labels=bf_io->bf
  ROOT %tuple.{n} = (bf16[64,256]{{1,0}}, bf16[64,256]{{1,0}}) tuple(%convolution.{n}, %q.{n})
}}

%end.{n} (q.{n}: bf16[64,256]) -> bf16[512,256] {{
  %q.{n} = bf16[64,256]{{1,0}} parameter(0)
  %all-gather.3{n} = {gather}, {chain}
  ROOT %custom-call.3{n} = bf16[512,256]{{1,0}} custom-call(%all-gather.3{n}), custom_call_target="AsyncCollectiveDone"
}}"""


def test_what_overlaps_a_tpu_chain_of_fusions():
    pair = "(bf16[64,256]{1,0}, bf16[64,256]{1,0})"
    entry = f"""%p = bf16[64,256]{{1,0}} parameter(0)
    %start.0 = {pair} fusion(%p), kind=kCustom, calls=%begin.0
    %on.0 = bf16[64,256]{{1,0}} get-tuple-element(%start.0), index=0
    %start.1 = {pair} fusion(%p), kind=kCustom, calls=%begin.1
    %on.1 = bf16[64,256]{{1,0}} get-tuple-element(%start.1), index=0
    %advances.0 = {pair} fusion(%on.0, %p), kind=kOutput, calls=%advance.0
    %computed = bf16[64,256]{{1,0}} get-tuple-element(%advances.0), index=0
    %on.2 = bf16[64,256]{{1,0}} get-tuple-element(%advances.0), index=1
    %advances.1 = {pair} fusion(%on.1, %computed), kind=kOutput, calls=%advance.1
    %on.3 = bf16[64,256]{{1,0}} get-tuple-element(%advances.1), index=1
    %done.1 = bf16[512,256]{{1,0}} fusion(%on.3), kind=kCustom, calls=%end.1
    %alone = bf16[64,256]{{1,0}} fusion(%p), kind=kLoop, calls=%fused
    %done.0 = bf16[512,256]{{1,0}} fusion(%on.2), kind=kCustom, calls=%end.0
    ROOT %after = bf16[512,256]{{1,0}} fusion(%done.0, %done.1), kind=kLoop, calls=%fused"""
    found = inspect.collectives(_hlo(entry, ADD, FUSED, _tpu_chain(0), _tpu_chain(1)))
    assert {c.name: c.overlapped for c in found} == {
        "all-gather.10": ("advances.0", "advances.1", "alone"),
        "all-gather.11": ("advances.0", "advances.1"),
    }


# The rest of a report.


def test_arguments_are_the_bytes_of_each_positional_argument_on_one_device():
    mesh = _mesh(data=4, tensor=2)

    def shape(dims, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    tree = {
        "cut": shape((64, 32), P("data", "tensor")),
        "whole": shape((5,), P(), jnp.bfloat16),
        "unused": shape((99,), P()),
    }

    def f(tree, keys, scale, *, shift):
        return tree["cut"] * tree["whole"].sum() * scale + jax.random.key_data(keys).sum() + shift

    compiled = jax.jit(f).lower(tree, shape((8,), P("data"), keys.dtype), 2.0, shift=shape((64, 32), P())).compile()
    report = inspect.report(compiled)
    assert report.arguments == (64 * 32 * 4 // 8 + 5 * 2, 8 * 8 // 4, 4)
    assert sum(report.arguments) + 64 * 32 * 4 == report.argument_bytes
    assert inspect.report(jax.jit(lambda: jnp.ones(3)).lower().compile()).arguments == ()


def test_flops_are_the_compilers_count_of_each_loop_once():
    def product(x):
        return x @ x

    def repeated(x, length):
        return lax.scan(lambda x, _: (product(x), None), x, None, length=length)[0]

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    once = inspect.report(jax.jit(product).lower(x).compile())
    assert (once.flops, once.platform) == (2 * 64**3, "cpu")
    loops = [inspect.report(jax.jit(repeated, static_argnums=1).lower(x, n).compile()).flops for n in (5, 50)]
    assert loops[0] == loops[1] < 3 * 2 * 64**3


def _overlapping_report():
    report = inspect.report(_compile(lambda x: lax.psum(x, "data"), _mesh(data=8), P("data"), P(), (64, 1024)))
    (first,) = report.collectives
    others = [dataclasses.replace(first, overlapped=names) for names in ((), ("fusion.1", "dot.2"))]
    scatter = dataclasses.replace(first, kind="reduce-scatter", dtypes=("f32", "bf16"))
    return dataclasses.replace(report, collectives=(first, *others, scatter), wire_bytes=0.1 + 0.2)


def test_a_report_comes_back_from_json():
    report = _overlapping_report()
    again = inspect.Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert again.collectives[2].overlapped == ("fusion.1", "dot.2")
    assert again.collectives[0].overlapped is None
    assert inspect.Report.from_dict(inspect.Report((), 0.0).to_dict()) == inspect.Report((), 0.0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("flops"),
        lambda d: d.update(more=1),
        lambda d: d.update(collectives=3),
        lambda d: d.update(collectives=[{"kind": "all-gather"}]),
        lambda d: d["collectives"][0].update(group_size="x"),
        lambda d: d["collectives"][0].update(trips=2),  # its wire bytes no longer fit
    ],
)
def test_a_spoiled_report_is_refused(spoil):
    plain = json.loads(json.dumps(_overlapping_report().to_dict()))
    spoil(plain)
    with pytest.raises(ValueError, match=r"Report\.from_dict needs what Report\.to_dict returns"):
        inspect.Report.from_dict(plain)
    with pytest.raises(ValueError, match=r"Report\.from_dict needs"):
        inspect.Report.from_dict([plain])  # pyright: ignore[reportArgumentType]


def test_the_table_has_the_rows_of_the_text():
    report = _overlapping_report()
    lines = str(report).splitlines()
    assert "overlapped with compute              1 of 4 collectives" in lines
    table = report.table()
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    headings = ["collective", "group", "dtype", "count", "executions", "bytes", "wire bytes"]
    assert [column.header for column in table.columns] == headings
    assert [list(row) for row in rows] == [line.split() for line in lines[1:3]]
    assert rows[0][:4] == ("all-reduce", "8", "f32", "3")
    assert table.caption == "\n".join(lines[4:])


# Pictures.


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_picture_says_what_each_device_holds():
    mesh = _mesh(replica=2, data=2, tensor=2)
    specs = {"a": P(("data", "tensor")), "b": P(None, ("tensor", "replica")), "c": P("replica", "data")}
    written = ["P(('data', 'tensor'))", "P(None, ('tensor', 'replica'))", "P('replica', 'data')"]
    tree = {name: jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, spec)) for name, spec in specs.items()}
    lines = inspect.picture(tree).splitlines()
    heads = _cells(lines[1])
    assert heads == [str(d.id) for d in mesh.devices.flat]
    for i, (name, x) in enumerate(tree.items()):
        assert lines[2 + 2 * i].split("  ") == [name, "(8, 16)", written[i]]
        held = {s.device.id: s.index for s in x.addressable_shards}
        bounds = [[dim.indices(size) for dim, size in zip(held[int(d)], x.shape, strict=True)] for d in heads]
        said = [
            ", ".join(":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b, _), n in zip(dims, x.shape, strict=True))
            for dims in bounds
        ]
        merged = [text for j, text in enumerate(said) if j == 0 or said[j - 1] != text]
        assert _cells(lines[3 + 2 * i]) == merged


def test_a_picture_needs_no_devices_and_groups_those_that_hold_the_same():
    mesh = jax.sharding.AbstractMesh((2, 4), ("replica", "data"))

    def leaf(dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    drawn = inspect.picture({"w": leaf((64, 32), P("data")), "b": leaf((), P())})
    assert drawn.splitlines() == [
        "device",
        "|   0,4    |   1,5    |   2,6    |   3,7    |",
        "b  ()  P()",
        "|                    ()                     |",
        "w  (64, 32)  P('data')",
        "| 0:16, :  | 16:32, : | 32:48, : | 48:64, : |",
    ]
    assert inspect.picture({"b": leaf((3,), P())}).splitlines()[1:] == ["| 0-7 |", "b  (3,)  P()", "|  :  |"]
    assert inspect.picture({}) == "no leaves"


def test_a_picture_of_many_devices_leaves_out_the_middle_and_says_so():
    mesh = jax.sharding.AbstractMesh((4096,), ("data",))
    leaf = jax.ShapeDtypeStruct((8192,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    lines = inspect.picture(leaf, width=60).splitlines()
    assert lines[0] == "device (4093 columns left out)"
    assert _cells(lines[1]) == ["0", "1", "...", "4095"]
    assert _cells(lines[3]) == ["0:2", "2:4", "...", "8190:8192"]
    assert max(map(len, lines[1::2])) <= 60


def test_a_picture_refuses_what_it_cannot_draw():
    mesh, other = (jax.sharding.AbstractMesh((n,), ("data",)) for n in (8, 4))

    def leaf(n, mesh):
        return jax.ShapeDtypeStruct((n,), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    with pytest.raises(ValueError, match=r"picture: x/0 has no sharding, and needs a NamedSharding; place it"):
        inspect.picture({"x": [np.ones(3)]})
    with pytest.raises(ValueError, match=r"picture: x has a SingleDeviceSharding"):
        inspect.picture({"x": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"picture: y is on the mesh .* and x on .*; draw them separately"):
        inspect.picture({"x": leaf(8, mesh), "y": leaf(8, other)})
