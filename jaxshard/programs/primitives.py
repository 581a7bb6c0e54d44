"""JAX's primitives in one table: a row for each, with a word for each thing that holds for it.

The lists below the table follow from it; each says what its word means. What has no word is known to no analysis, which
then gives its safe answer. A test asks every primitive of the JAX versions that we support to have a row.
"""

_TABLE = """
abs                          pointwise fused
acos                         pointwise fused
acosh                        pointwise
add                          pointwise linear keeps_sign fused
add_any                      pointwise linear keeps_sign fused
all_gather                   gathers
all_gather_invariant         gathers
all_to_all                   differs
all_to_all_start             differs
and                          pointwise fused
approx_top_k                 pure
argmax                       pure fused reduction
argmin                       pure reduction
asin                         pointwise fused
asinh                        pointwise
atan                         pointwise fused
atan2                        pointwise fused
atanh                        pointwise
axis_index                   differs fused memoryless
bessel_i0e                   pointwise
bessel_i1e                   pointwise
bitcast_convert_type         pointwise fused
broadcast_in_dim             moves pure keeps_fill linear keeps_sign fused memoryless
cbrt                         pointwise fused
ceil                         pointwise no_gradient fused
checkpoint                   remat
cholesky                     pure matrices
cholesky_update              pure
clamp                        moves pointwise fused
closed_call                  inlined
clz                          pointwise
complex                      pointwise fused
composite                    call
concatenate                  moves pure linear keeps_sign fused
cond                         loop
conj                         pointwise fused
conv_general_dilated         pure product
convert_element_type         same pointwise fused passed_on
copy                         same pointwise fused passed_on
copy_p                       same pointwise view
core_call                    inlined
cos                          pointwise fused
cosh                         pointwise fused
cumlogsumexp                 pure reduction cumulative
cummax                       moves pure cumulative
cummin                       moves pure cumulative
cumprod                      pure cumulative
cumsum                       pure keeps_sign reduction cumulative
custom_jvp_call              call
custom_linear_solve          pure
custom_vjp_call              call
custom_vjp_call_jaxpr        call
debug_callback               debugging
debug_print                  debugging
device_put                   moves
digamma                      pointwise fused
div                          pointwise keeps_sign fused
dot_general                  pure keeps_sign product
dynamic_slice                moves pure fused
dynamic_update_slice         moves pure update
eig                          pure matrices
eigh                         pure matrices
eq                           pointwise fused
eq_to                        pointwise
erf                          pointwise fused
erf_inv                      pointwise fused
erfc                         pointwise fused
exp                          pointwise fused
exp2                         pointwise fused
expand_dims                  same view
expm1                        pointwise fused
fft                          pure
floor                        pointwise no_gradient fused
free_ref                     reads_refs
freeze                       moves reads_refs
gather                       moves pure
ge                           pointwise fused
geqrf                        matrices
get                          moves reads_refs
gt                           pointwise fused
hessenberg                   pure
householder_product          pure matrices
igamma                       pointwise
igamma_grad_a                pointwise
igammac                      pointwise
imag                         pointwise linear fused
integer_pow                  pointwise fused
iota                         pure fused memoryless
is_finite                    pointwise fused
jit                          inlined
le                           pointwise fused
le_to                        pointwise
lgamma                       pointwise fused
log                          pointwise fused
log1p                        pointwise fused
log2                         pointwise
logistic                     pointwise fused
lt                           pointwise fused
lt_to                        pointwise
lu                           pure matrices
lu_pivots_to_permutation     pure
max                          moves pointwise fused
min                          moves pointwise keeps_sign fused
mul                          pointwise keeps_sign fused
mulhi                        pointwise
name                         moves pointwise linear keeps_sign view
ne                           pointwise fused
neg                          moves pointwise linear fused
new_ref                      moves
nextafter                    pointwise fused
not                          pointwise fused
one_minus_square             pointwise
optimization_barrier         same view
or                           pointwise fused
ormqr                        pure
pad                          moves pure linear fused
pcast                        cast moves pointwise view
pjit                         inlined
platform_index               pure
pmax                         all_reduces
pmin                         all_reduces
polygamma                    pointwise
population_count             pointwise fused
pow                          pointwise keeps_sign fused
ppermute                     differs
ppermute_start               differs
precv                        differs
psum                         all_reduces
psum_invariant               all_reduces
pure_callback                pure
pvary                        cast moves pointwise view
qr                           pure matrices
ragged_all_to_all            differs
ragged_dot_general           pure
random_bits                  pure draws fused memoryless
random_clone                 pure
random_fold_in               pure
random_gamma                 pure draws
random_seed                  pure
random_split                 pure
random_unwrap                pure
random_wrap                  pure reads_keys
real                         pointwise linear fused
reduce                       pure
reduce_and                   pure fill_if_any reduction
reduce_max                   moves pure fill_if_any keeps_sign reduction
reduce_min                   moves pure fill_if_any keeps_sign reduction
reduce_or                    pure fill_if_any reduction
reduce_precision             moves pointwise fused
reduce_prod                  pure reduction
reduce_scatter               differs
reduce_scatter_start         differs
reduce_sum                   pure linear keeps_sign reduction
reduce_window                pure
reduce_window_max            pure
reduce_window_min            pure
reduce_window_sum            pure
reduce_xor                   pure
regularized_incomplete_beta  pure
rem                          pointwise fused
remat                        remat
remat2                       remat
reshape                      same pure keeps_fill view
reshard                      moves pointwise
rev                          moves pure keeps_fill linear fused passed_on
rng_bit_generator            pure reads_keys draws
rng_uniform                  draws
round                        pointwise no_gradient fused
rsqrt                        pointwise keeps_sign fused
scan                         loop
scatter                      moves pure update
scatter-add                  pure update
scatter-max                  pure
scatter-min                  pure
scatter-mul                  pure
scatter-sub                  pure
schur                        pure matrices
select_and_gather_add        pure
select_and_scatter_add       pure
select_n                     moves pointwise fused
sharding_constraint          moves pointwise linear keeps_sign
shift_left                   pointwise fused
shift_right_arithmetic       pointwise fused
shift_right_logical          pointwise fused
sign                         pointwise no_gradient fused
sin                          pointwise fused
sinh                         pointwise fused
slice                        moves pure keeps_fill linear keeps_sign fused passed_on
sort                         moves pure
split                        moves pure
sqrt                         pointwise keeps_sign fused
square                       pointwise fused
squeeze                      same pure keeps_fill view
stack                        moves pure fused
stop_gradient                moves pointwise linear keeps_sign no_gradient
sub                          pointwise linear fused
svd                          pure matrices
swap                         moves
symmetric_product            pure
tan                          pointwise fused
tanh                         pointwise fused
threefry2x32                 pure reads_keys draws
tile                         moves pure
top_k                        moves pure
transpose                    moves pure keeps_fill linear keeps_sign fused passed_on
triangular_solve             pure matrices
tridiagonal                  pure matrices
tridiagonal_solve            pure
unreduced_reduce_scatter     differs
unreduced_reduce_scatter_start differs
unstack                      moves pure
while                        loop
xor                          pointwise fused
zeta                         pointwise
"""

_OTHERS = """
accum_grad_in_ref addupdate after_all all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start
all_to_all_done box_get box_set broadcast_to call call_exported call_hi_primitive call_hi_primitive_linearized check
core_map create_linear create_token cudnn_fusion custom_jvp_call_jaxpr custom_lin custom_partitioning
custom_vmap_call dce_sink delay dim_as_value dimension_size dot_product_attention_bwd
dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
dot_product_attention_fwd_wrapper empty empty2 empty_ref eval_jaxpr ffi_call from_edtype fused_attention
fused_attention_backward geqp3 get_global get_variable global_array_to_host_local_array
host_local_array_to_global_array inspect_sharding io_callback iota_2x32_shape jaxpr_call layout_constraint
linear_call log_extend log_read masked_load masked_swap mpmd_map multiple_of new_box new_log new_variable
num_programs pallas_call pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start philox2x32 philox4x32 pin
polynomial ppermute_done preduced program_id psend psum_done psum_invariant_start psum_start reciprocal
reduce_scatter_done reduced_vary_cast reduced_vary_cast_p relayout remat_opt run_scoped run_state scaled_dot
scaled_matmul scaled_matmul_wrapper select_and_scatter semaphore_read semaphore_signal semaphore_wait set_variable
shape_assertion shard_map stage threefry4x32 tie to_edtype unpin unreachable unreduced_pmax unreduced_pmin
unreduced_psum unreduced_psum_start vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
xla_metadata_call xla_metadata_value zeros_like
"""

_IMPLIES = {"same": "moves", "inlined": "call", "remat": "call"}
ROWS = {
    name: frozenset([*words, *(_IMPLIES[word] for word in words if word in _IMPLIES)])
    for name, *words in map(str.split, _TABLE.strip().splitlines())
} | dict.fromkeys(_OTHERS.split(), frozenset[str]())
"""The words of each primitive."""


def _with(word: str) -> frozenset[str]:
    return frozenset(name for name, words in ROWS.items() if word in words)


# Equations that run an inner program.

INLINED = _with("inlined")
"""Calls that only run their inner program."""

REMAT = _with("remat")
"""Calls that the backward pass recomputes."""

CALLS = _with("call")
"""All calls. A custom_jvp or custom_vjp equals its inner program only where nothing is differentiated."""

LOOPS = _with("loop")
"""Control flow, whose inner programs are followed."""

# What operations do to a value.

CASTS = _with("cast")
"""Change only a value's type: the mesh axes over which it varies."""

SAME_NUMBERS = _with("same")
"""Return the same numbers, cast or in another shape."""

MOVES = _with("moves")
"""Return numbers of their operands: moved, chosen, rounded, or with the other sign."""

READS_REFS = _with("reads_refs")
"""Take mutable arrays, and write to none."""

POINTWISE = _with("pointwise")
"""Each element of the result depends only on the operands' elements at the same index."""

PURE = _with("pure")
"""Depend on their operands and parameters alone: equal ones give equal results on every device.

(`regularized_incomplete_beta` goes on until all elements converge, so that each depends on all, in its last digits.)
"""

KEEPS_FILL = _with("keeps_fill")
"""Turn an array that holds one number in every element into another such array."""

FILL_IF_ANY = _with("fill_if_any")
"""Reduce equal numbers to that number."""

ADDS = _with("linear")
"""Are linear in all operands together."""

KEEPS_SIGN = _with("keeps_sign")
"""Make no number below 0 of numbers that are not."""

NO_GRADIENT = _with("no_gradient")
"""Have a gradient of zero, though their results are floating."""

LINEAR_ALGEBRA = _with("matrices")
"""Operations on whole matrices, batched over the dims before the last two."""

# Devices, random numbers, the host.

ALL_REDUCES = _with("all_reduces")
"""Give all devices along their `axes` one result, whatever each of them had."""

DIFFERS = _with("differs")
"""Give each device along a mesh axis another result, also where all operands are equal on all."""

GATHERS = _with("gathers")
"""Put the parts of all devices along a mesh axis together."""

READS_KEYS = _with("reads_keys")
"""Take whole numbers for the state of a random generator."""

DRAWS = _with("draws")
"""Make random numbers."""

DEBUGGING = _with("debugging")
"""Call the host for a look at values, on each device that computes them; nothing depends on that."""

# What operations cost; `jaxshard.plan` asks.

FUSED = _with("fused")
"""Work element by element, or by index alone; the compiler fuses them into the operation that reads the result."""

CUMULATIVE = _with("cumulative")
"""Run along one dim, and have a result for each place in it."""

REDUCTIONS = _with("reduction")
"""Make few numbers of many, or one of all before it."""

UPDATES = _with("update")
"""Write into their first operand."""

MEMORYLESS = _with("memoryless")
"""Read almost no memory, so they are fused into every reader, even where there are several."""

PRODUCTS = _with("product")
"""Matrix products and convolutions. On TPU both take bfloat16 where their precision is the default."""

PASSED_TO_PRODUCTS = _with("passed_on")
"""Pass a value on to a product; XLA for TPU may narrow its dtype on the way."""

VIEWS = _with("view")
"""Return another view of the same memory; no bytes move."""

ATTENTION_PRODUCTS = {
    ("fused_attention", "cudnn"): 2,
    ("fused_attention", "splash"): 2,
    ("fused_attention_backward", "cudnn"): 5,
    ("fused_attention_backward", "splash"): 7,
}
"""Matrix products that causal attention in one kernel makes, for each pair of positions of a head that it looks at, by
primitive and kernel. Its operands and results alone are in memory. The backward pass makes the weights again: splash
attention twice, once for the queries' gradient and once for that of keys and values.
"""

FUSED_INTO = {
    "dot_general": frozenset({"transpose", "slice", "rev", "convert_element_type"}),
    "conv_general_dilated": frozenset({"rev"}),
}
"""What every compiler makes part of a product that reads its result; a convolution can read its kernel backwards. Other
work is not done again at each place of a convolution's window.
"""

COLLECTIVE_KINDS = dict.fromkeys(ALL_REDUCES | {"psum2", "pmean"}, "all-reduce") | {
    **dict.fromkeys(GATHERS, "all-gather"),
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""The kind (`inspect.Collective.kind`) of each collective primitive of the local view."""
