# ruff: noqa: E501 - an instruction of HLO text is one line, however long
"""`inspect.schedule` against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxshard import inspect

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
SIZE = 8 * 256 * 4  # bytes of f32[8,256]

PAIRS = """
ENTRY %main (p: f32[8,256]) -> f32[64,256] {
  %p = f32[8,256]{1,0} parameter(0)
  %start = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
  %product = f32[8,8]{1,0} BETWEEN
  %gathered = f32[64,256]{1,0} all-gather-done(%start)
  %summed = f32[8,256]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add
  %copied = f32[8,256]{1,0} copy(%p)
  ROOT %after = f32[64,256]{1,0} negate(%gathered)
}
"""


@pytest.mark.parametrize(
    ("between", "num_covered"),
    [
        ("dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}", 1),
        ('custom-call(%p, %p), custom_call_target="__cublas$gemm"', 1),
        ("slice(%p), slice={[0:8], [0:8]}", 0),
    ],
)
def test_a_collective_is_covered_by_a_matrix_product_between_its_start_and_its_done(between, num_covered):
    found = inspect.schedule(HEAD + ADD + PAIRS.replace("BETWEEN", between))
    assert (found.num_covered, found.num_collectives) == (num_covered, 2)
    assert (found.covered_bytes, found.payload_bytes) == (num_covered * 8 * SIZE, 8 * SIZE + SIZE)
    sliced = 0 if num_covered else 8 * 8 * 4 + SIZE
    assert found.kernel_bytes == 2 * SIZE + 2 * 8 * SIZE + sliced


LOOP = """
%slicing (q: f32[6,256], i: s32[], whole: f32[6,256]) -> f32[6,256] {
  %q = f32[6,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %whole = f32[6,256]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%q, %i, %zero), dynamic_slice_sizes={1,256}
  ROOT %new = f32[6,256]{1,0} dynamic-update-slice(%whole, %row, %i, %zero)
}

%body (t: (s32[], f32[6,256], f32[6,256])) -> (s32[], f32[6,256], f32[6,256]) {
  %t = (s32[], f32[6,256]{1,0}, f32[6,256]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%t), index=0
  %from = f32[6,256]{1,0} get-tuple-element(%t), index=1
  %to = f32[6,256]{1,0} get-tuple-element(%t), index=2
  %moved = f32[6,256]{1,0} fusion(%from, %count, %to), kind=kLoop, calls=%slicing
  ROOT %turn = (s32[], f32[6,256]{1,0}, f32[6,256]{1,0}) tuple(%count, %from, %moved)
}

%condition (s: (s32[], f32[6,256], f32[6,256])) -> pred[] {
  %s = (s32[], f32[6,256]{1,0}, f32[6,256]{1,0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (p: (s32[], f32[6,256], f32[6,256])) -> (s32[], f32[6,256], f32[6,256]) {
  %p = (s32[], f32[6,256]{1,0}, f32[6,256]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[6,256]{1,0}, f32[6,256]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_a_slice_counts_as_the_slice_and_an_update_in_place_as_the_update():
    """Each of 6 turns reads a row and the counter, and writes a row."""
    assert inspect.schedule(HEAD + LOOP).kernel_bytes == 6 * (256 * 4 + 4 + 256 * 4)


def test_a_compiled_program_is_read():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.zeros((64, 64))).compile()
    found = inspect.schedule(compiled)
    assert (found.num_collectives, found.payload_bytes) == (0, 0)
    assert found.kernel_bytes >= 2 * 64 * 64 * 4


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="a compiled program"):
        inspect.schedule("no program")
