"""JAX's primitives in one table: the kind of each, and a word for each of its properties.

A kind tells which parameters an operation has, and where elements go; `primitives` defines each word. For a primitive
with neither, an analysis gives its safe answer. A test requires a row for every primitive of the JAX versions that we
support. Primitives with the same kind and words share a row.
"""

from typing import Literal, TypeAlias, cast

Kind: TypeAlias = Literal[
    "pointwise",  # each element of the result depends only on the operands' elements at the same index
    "reduction",  # over the dims `axes`
    "cumulative",  # along the dim `axis`
    "sort",  # along the dim `dimension`
    "window",  # over `window_dimensions`
    "dot",
    "conv",
    "trailing",  # works on the last `mixed_dims` dims as a whole, for each index of the dims before
    "triangular_solve",
    "pivots",
    "top_k",
    "batched",  # works on each index of the first dim by itself
    "iota",
    "broadcast",
    "reshape",
    "squeeze",
    "transpose",
    "rev",
    "slice",
    "dynamic_slice",
    "update",
    "gather",
    "scatter",
    "concatenate",
    "stack",
    "unstack",
    "split",
    "tile",
    "pad",
    "random",  # of typed keys
    "barrier",
    "placement",  # the same array in another place, or as a mutable array
    "access",  # to a mutable array
    "axis_index",
    "all_reduce",  # over the mesh axes `axes`; also the start and the end of one
    "all_gather",
    "exchange",  # any other collective
    "call",
    "shard_map",
    "scan",
    "while",
    "cond",
    "solve",
]

_TABLE = """
abs : pointwise homogeneous fused not_negative
acos and asin atan atan2 bitcast_convert_type cos cosh digamma erf erf_inv erfc expm1 is_finite lgamma : pointwise fused
log log1p logistic nextafter not or population_count rem shift_left shift_right_arithmetic : pointwise fused
shift_right_logical sin sinh tan tanh xor : pointwise fused
acosh asinh atanh bessel_i0e bessel_i1e clz eq_to igamma igamma_grad_a igammac le_to log2 lt_to mulhi : pointwise
one_minus_square polygamma zeta : pointwise
add add_any : pointwise linear keeps_sign fused adds
cbrt : pointwise fused power=1/3
ceil floor round : pointwise no_gradient fused
clamp : pointwise moves homogeneous fused guards clips
complex conj : pointwise sums fused
convert_element_type : pointwise same fused passed_on into_dot
copy : pointwise same fused passed_on
copy_p : pointwise same view
div mul : pointwise keeps_sign fused multiplies
eq ge gt le lt ne : pointwise fused compares guards
exp exp2 : pointwise fused not_negative
imag real sub : pointwise linear fused
integer_pow : pointwise homogeneous fused keeps_sign
max : pointwise moves homogeneous fused guards clips
min : pointwise moves homogeneous keeps_sign fused clips
name : pointwise whole moves linear keeps_sign view
neg : pointwise moves linear fused
pcast pvary : pointwise moves sums cast view
pow : pointwise keeps_sign fused
reduce_precision : pointwise moves fused
reshard : pointwise moves sums
rsqrt : pointwise keeps_sign fused power=-0.5
select_n : pointwise moves sums fused numbers=1: chooses
sharding_constraint : pointwise moves linear keeps_sign
sign : pointwise no_gradient fused power=0 clips
sqrt : pointwise keeps_sign fused power=0.5
square : pointwise fused power=2 not_negative
stop_gradient : pointwise moves linear keeps_sign no_gradient
argmax : reduction homogeneous pure fused reduces
argmin reduce_prod : reduction homogeneous pure reduces
reduce_and reduce_or : reduction homogeneous pure fill_if_any reduces
reduce_max : reduction moves homogeneous pure fill_if_any keeps_sign reduces then=pmax
reduce_min : reduction moves homogeneous pure fill_if_any keeps_sign reduces then=pmin
reduce_sum : reduction linear pure keeps_sign reduces adds_up
reduce_xor : reduction homogeneous pure
cumlogsumexp : cumulative pure reduces
cummax cummin : cumulative moves pure
cumprod : cumulative pure
cumsum : cumulative sums pure keeps_sign reduces
sort : sort moves homogeneous pure numbers=:1
reduce_window_max reduce_window_min : window homogeneous pure
reduce_window_sum : window sums pure adds_up
dot_general : dot pure keeps_sign product multiplies adds_up
conv_general_dilated : conv pure product multiplies adds_up
cholesky eig eigh householder_product lu qr schur svd tridiagonal : trailing pure matrices
fft : trailing sums pure
geqrf : trailing matrices
triangular_solve : triangular_solve pure matrices
lu_pivots_to_permutation : pivots pure
top_k : top_k moves homogeneous pure
dot_product_attention_bwd dot_product_attention_bwd_wrapper : batched linear_in_last
dot_product_attention_fwd dot_product_attention_fwd_wrapper : batched
iota : iota pure fused memoryless sizes=shape
broadcast_in_dim : broadcast moves linear pure keeps_fill keeps_sign fused memoryless sizes=shape
reshape : reshape same pure keeps_fill view sizes=new_sizes
squeeze : squeeze same pure keeps_fill view
transpose : transpose whole moves linear pure keeps_fill keeps_sign fused passed_on into_dot
rev : rev moves linear pure keeps_fill fused passed_on into_dot into_conv
slice : slice moves linear pure keeps_fill keeps_sign fused passed_on sizes=limit_indices into_dot cuts
dynamic_slice : dynamic_slice moves sums pure fused numbers=:1 sizes=slice_sizes picks cuts
dynamic_update_slice : update moves sums pure overwrites numbers=:2
gather : gather moves sums pure numbers=:1 sizes=slice_sizes picks
scatter : scatter moves sums pure overwrites numbers=::2
scatter-add : scatter sums pure overwrites numbers=::2 adds_up
scatter-max scatter-min scatter-mul : scatter homogeneous pure numbers=::2
scatter-sub : scatter sums pure numbers=::2
concatenate : concatenate moves linear pure keeps_sign fused
stack : stack moves sums pure fused
unstack : unstack moves pure
split : split moves pure
tile : tile moves pure
pad : pad moves linear pure fused
random_bits : random pure draws fused memoryless several
random_clone random_fold_in random_seed random_unwrap : random pure
random_gamma : random pure draws several
random_split : random pure several
random_wrap : random pure reads_keys
optimization_barrier : barrier same view
device_put new_ref : placement moves
freeze : placement moves only_reads
get : access moves only_reads
swap : access moves
axis_index : axis_index differs fused memoryless
pmax pmin : all_reduce all_reduces sent=all-reduce
psum psum_invariant : all_reduce all_reduces adds_up sent=all-reduce
psum_done psum_invariant_start psum_start : all_reduce adds_up
all_gather all_gather_invariant : all_gather gathers sent=all-gather
all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start : all_gather
all_to_all : exchange differs sent=all-to-all
all_to_all_done pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute_done : exchange
reduce_scatter_done : exchange
all_to_all_start ppermute_start reduce_scatter_start : exchange differs
ppermute : exchange differs sent=collective-permute
ragged_all_to_all : exchange differs sent=ragged-all-to-all
reduce_scatter : exchange differs sent=reduce-scatter
checkpoint remat remat2 : call remat
closed_call core_call jit pjit : call inlined
composite : call
custom_jvp_call : call own_gradient
custom_vjp_call custom_vjp_call_jaxpr : call own_gradient own_backward
shard_map : shard_map
scan : scan
while : while homogeneous
cond : cond homogeneous chooses
custom_linear_solve : solve pure
approx_top_k cholesky_update hessenberg ormqr platform_index pure_callback ragged_dot_general reduce : - pure
reduce_window regularized_incomplete_beta select_and_gather_add select_and_scatter_add symmetric_product : - pure
tridiagonal_solve : - pure
debug_callback debug_print : - debugging
ffi_call io_callback pallas_call : - unpartitioned
free_ref : - only_reads
precv unreduced_reduce_scatter unreduced_reduce_scatter_start : - differs
rng_bit_generator threefry2x32 : - pure reads_keys draws
rng_uniform : - draws
"""

_OTHERS = """
accum_grad_in_ref addupdate after_all box_get box_set broadcast_to call call_exported call_hi_primitive
call_hi_primitive_linearized check core_map create_linear create_token cudnn_fusion custom_jvp_call_jaxpr custom_lin
custom_partitioning custom_vmap_call dce_sink delay dim_as_value dimension_size dot_product_attention_fp8_bwd
dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper empty empty2
empty_ref eval_jaxpr from_edtype geqp3 get_global get_variable global_array_to_host_local_array
host_local_array_to_global_array inspect_sharding iota_2x32_shape jaxpr_call layout_constraint linear_call log_extend
log_read masked_load masked_swap mpmd_map multiple_of new_box new_log new_variable num_programs philox2x32 philox4x32
pin polynomial preduced program_id psend reciprocal reduced_vary_cast reduced_vary_cast_p relayout remat_opt
run_scoped run_state scaled_dot scaled_matmul scaled_matmul_wrapper select_and_scatter semaphore_read semaphore_signal
semaphore_wait set_variable shape_assertion stage threefry4x32 tie to_edtype unpin unreachable unreduced_pmax
unreduced_pmin unreduced_psum unreduced_psum_start vary_unreduced_cast vary_unreduced_cast_p
with_memory_space_constraint xla_metadata_call xla_metadata_value zeros_like
"""
"""Primitives with neither kind nor words."""

_IMPLIES = {
    "same": ("moves", "whole", "linear", "sums", "homogeneous", "keeps_sign"),
    "linear": ("sums", "homogeneous"),
    "sums": ("homogeneous",),
    "power": ("homogeneous",),
}
_GROUPS = [row.partition(" : ") for row in _TABLE.strip().splitlines()]
_EACH = [(name, *words.split()) for names, _, words in _GROUPS for name in names.split()]

KINDS: dict[str, Kind] = {name: cast("Kind", kind) for name, kind, *_ in _EACH if kind != "-"}
"""The kind of each primitive that has one."""


def _said(word: str) -> dict[str, str]:
    """A word with its value after "=", and the words that it implies."""
    name, _, value = word.partition("=")
    return {name: value} | dict.fromkeys(_IMPLIES.get(name, ()), "")


ROWS: dict[str, dict[str, str]] = {
    **{name: {key: value for word in words for key, value in _said(word).items()} for name, _, *words in _EACH},
    **{name: {} for name in _OTHERS.split()},
}
"""For each primitive, its words (implied ones too), with their values after "="."""
