"""What the plan takes a fusing compiler to write to memory; the compilers' own figures are in docs/plan_figures.md."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.plan import from_jaxpr, xla_gpu
from jaxshard.plan.fusion import Fusion
from jaxshard.plan.memory import peak_bytes
from jaxshard.plan.program import product_flops

N = 1 << 16


def block(f, *shapes, sizes=None):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return from_jaxpr.written_out(jax.jit(f).trace(*args).jaxpr, [P()] * len(args), sizes or {}, "gpu")


def written(f, *shapes):
    """The names of the operations whose results are written to memory."""
    found = block(f, *shapes)
    return [op.name for op in found.ops if not Fusion(found, "gpu").is_virtual(op)]


def test_an_optimizers_new_moment_is_never_written_beside_what_is_selected():
    def update(old, grad, param, ok):
        new = 0.9 * old + grad
        return jnp.where(ok > 0, new, old), jnp.where(ok > 0, param - new / 2, param)

    assert written(update, (N,), (N,), (N,), ()) == ["select_n", "select_n"]


def test_a_residual_stream_is_written_once():
    def layer(x, y, w):
        x = x + y
        return (x / jnp.max(jnp.abs(x), -1, keepdims=True)) @ w + x

    assert written(layer, (64, 64), (64, 64), (64, 64)).count("add") == 2


@pytest.mark.parametrize(("levels", "is_written"), [(3, False), (9, True)])
def test_a_kernel_has_the_code_of_an_operation_only_so_often(levels, is_written):
    """Each level reads the one before at two indices: one kernel would have the first level's code 2^n times."""

    def halved(x):
        x = jnp.tanh(x)
        for _ in range(levels):
            x = x[::2] * x[1::2]
        return x

    assert (len(written(halved, (N,))) > 1) == is_written


def test_a_chain_of_any_length_is_read():
    def long(x):
        return functools.reduce(lambda x, _: jnp.sin(x), range(5000), x)

    assert peak_bytes(block(long, (N,)), (), "gpu") == 4 * N


@pytest.mark.parametrize("how", ["as it is", "cast", "beside an inner loop", "reduced in an inner loop"])
def test_the_gradients_of_the_iteration_before(how):
    def reduced(x):
        return jax.lax.psum_scatter(collectives.vary(x, ("data",)), "data", tiled=True)

    def body(x, row):
        if how == "reduced in an inner loop":
            return x, jax.lax.scan(lambda c, r: (c, reduced(r + row)), 0.0, jnp.zeros((3, 64)))[1]
        inner = jax.lax.scan(lambda c, r: (c + r, None), 0.0, row)[0] if how == "beside an inner loop" else 0.0
        found = reduced(row + inner)
        return x, found.astype(jnp.float16) if how == "cast" else found

    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loop = jax.shard_map(lambda xs: jax.lax.scan(body, 0.0, xs)[1], mesh=mesh, in_specs=P(), out_specs=P(None, "data"))
    (scan,) = (op for op in block(loop, (5, 64), sizes={"data": 8}).ops if op.name == "scan")
    expected = 0 if how == "reduced in an inner loop" else 4 * 64
    assert xla_gpu.bytes_of_previous_iteration(scan.blocks[0]) == expected


@pytest.mark.parametrize(("platform", "names"), [("gpu", ["mul"]), ("tpu", ["slice", "pad", "mul"])])
def test_strides_are_written_on_tpu(platform, names):
    """XLA for TPU writes each level of an `associative_scan`, and of its gradient."""
    spread = [(1, 0, 1)]  # a zero before each element

    def shifted(x):
        return 3 * jax.lax.pad(2 * jax.lax.slice(x, (0,), (N,), (2,)), jnp.float32(0), spread)

    traced = jax.jit(shifted).trace(jax.ShapeDtypeStruct((N,), jnp.float32)).jaxpr
    found = from_jaxpr.written_out(traced, [P()], {}, platform)
    assert [op.name for op in found.ops if not Fusion(found, platform).is_virtual(op)] == names


@pytest.mark.parametrize(
    ("waits", "platform", "held"), [(False, "gpu", 3), (True, "gpu", 2), (False, "tpu", 1), (True, "tpu", 1)]
)
def test_reduce_scatters_are_joined_unless_one_waits_for_another(waits, platform, held):
    """Three sums; `waits`: the last begins when the first has ended. The second is joined with the last then."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sums(x):
        x = collectives.vary(x, ("data",))
        shards = []
        for scale in (2.0, 3.0, 4.0):
            if waits and len(shards) == 2:
                x, shards[0] = jax.lax.optimization_barrier((x, shards[0]))
            shards.append(jax.lax.psum_scatter(jnp.sin(scale * x), "data", tiled=True))
        return shards

    run = jax.shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P("data"))
    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((N,), jnp.float32)).jaxpr
    found = from_jaxpr.written_out(traced, [P()], {"data": 8}, platform)
    assert held * 4 * N <= peak_bytes(found, (), platform) <= (held + 3 / 8) * 4 * N


@pytest.mark.parametrize(
    ("cut", "platform", "kind"),
    [
        (P("data"), "gpu", "reduce-scatter"),
        (P(None, "data"), "tpu", "reduce-scatter"),
        (P(), "gpu", "all-reduce"),
        (P("data"), "cpu", "all-reduce"),
    ],
)
def test_a_sum_that_is_cut_is_a_reduce_scatter_in_the_global_view(cut, platform, kind):
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def weight_gradient(x, y):
        found = (x.T @ y).T
        return jax.lax.with_sharding_constraint(found, jax.sharding.NamedSharding(mesh, cut))

    args = [jax.ShapeDtypeStruct((64, size), jnp.float32) for size in (16, 24)]
    traced = jax.jit(weight_gradient).trace(*args).jaxpr
    found = from_jaxpr.written_out(traced, [P("data")] * 2, {"data": 8}, platform)
    (moved,) = (m for op in found.ops for m in op.moved)
    assert (moved.kind, moved.bytes) == (kind, 16 * 24 * 4)
    assert found.outs[0].bytes == 16 * 24 * 4 // (8 if cut else 1)
    (product,) = (op for op in found.ops if op.name == "dot_general")
    assert product_flops(product) == 2 * 64 * 16 * 24 / 8


@pytest.mark.parametrize(("carried", "kind"), [(False, "reduce-scatter"), (True, "all-reduce")])
def test_a_sum_in_a_loop_is_a_reduce_scatter_if_the_stack_is_cut_afterwards(carried, kind):
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def weight_gradients(x, y):
        def turn(last, layer):
            found = layer.T @ y
            return (found if carried else last), found

        last, stack = jax.lax.scan(turn, jnp.zeros((16, 24)), x)
        return jax.lax.with_sharding_constraint(stack, jax.sharding.NamedSharding(mesh, P(None, "data"))), last

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 64, 16), (64, 24))]
    traced = jax.jit(weight_gradients).trace(*args).jaxpr
    found = from_jaxpr.written_out(traced, [P(None, "data"), P("data")], {"data": 8}, "gpu")
    (loop,) = (op for op in found.ops if op.blocks)
    (moved,) = (m for op in loop.blocks[0].ops for m in op.moved)
    assert (moved.kind, moved.bytes) == (kind, 16 * 24 * 4)
    assert found.outs[0].bytes == 3 * 16 * 24 * 4 // 8


def convolution(size, stride, *, transposed=False):
    """Name, input's shape and result's shape of a convolution of 8 x 8 images and its gradients, as XLA for GPU has
    them, and of the copies of arrays that it makes for them."""
    run = jax.lax.conv_transpose if transposed else jax.lax.conv_general_dilated

    def loss(x, kernel):
        y = run(jnp.tanh(x), kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.sin(y))

    gradients = jax.grad(loss, (0, 1))
    ops = xla_gpu.as_for_cudnn(block(gradients, (2, 8, 8, 16), (size, size, 16, 32))).ops
    kept = [op for op in ops if op.name in ("pad", "sliced_copy", "conv_general_dilated")]
    return [(op.name.split("_")[0], op.ins[0].shape, op.outs[0].shape) for op in kept]


def test_unevenly_padded_inputs_and_gradients_of_convolutions_are_copied():
    """A 3 x 3 convolution of stride 2 on 128 x 128 images has arrays of 129 x 129 in the program compiled for H100."""
    small, large, result = (2, 8, 8, 16), (2, 9, 9, 16), (2, 4, 4, 32)
    assert convolution(3, 2) == [
        ("pad", small, large),
        ("conv", large, result),
        ("conv", large, (3, 3, 16, 32)),
        ("conv", result, large),
        ("sliced", large, small),
    ]


@pytest.mark.parametrize(("size", "stride"), [(4, 2), (3, 1), (1, 1)])
def test_evenly_padded_convolutions_copy_only_kernels(size, stride):
    result = (2, 8 // stride, 8 // stride, 32)
    gradients = [("conv", (2, 8, 8, 16), (size, size, 16, 32)), ("conv", result, (2, 8, 8, 16))]
    assert convolution(size, stride) == [("conv", (2, 8, 8, 16), result), *gradients]


def test_a_transposed_convolution_reads_a_copy_with_zeros_between_the_elements():
    """One of 64 x 64 images (4 x 4, stride 2) reads 131 x 131 as compiled for H100; its gradients do not."""
    spread, result = (2, 19, 19, 16), (2, 16, 16, 32)
    assert convolution(4, 2, transposed=True) == [
        ("pad", (2, 8, 8, 16), spread),
        ("conv", spread, result),
        ("conv", (2, 8, 8, 16), (4, 4, 16, 32)),
        ("conv", result, (2, 8, 8, 16)),
    ]
