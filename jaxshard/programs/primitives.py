"""Properties of JAX's primitives: lists and questions, all derived from the one `table`.

A primitive that is not JAX's own may describe itself by three parameters of its equations (`bind`):

  mixed_dims         the number of last dims that it works on as a whole, for each index of the dims before;
  flops_per_element  its multiplications and additions, per element of its first operand;
  linear_in_last     whether its results are linear in its last operand, as those of a backward pass are.
"""

from fractions import Fraction

from jaxshard.base.types import Equation
from jaxshard.programs.table import KINDS, ROWS, Kind


def kind_of(eqn: Equation) -> Kind | None:
    """The kind of an operation; None if unknown."""
    return KINDS.get(eqn.primitive.name) or ("trailing" if "mixed_dims" in eqn.params else None)


def mixed_dims(eqn: Equation) -> int:
    """The number of last dims that an operation of the kind "trailing" works on as a whole."""
    return len(eqn.params["fft_lengths"]) if "fft_lengths" in eqn.params else eqn.params.get("mixed_dims", 2)


def is_linear_in_last(eqn: Equation) -> bool:
    """Whether all results are linear in the last operand, for any values of the others."""
    return eqn.primitive.name in LINEAR_IN_LAST or eqn.params.get("linear_in_last", False)


def power_of(eqn: Equation) -> float | None:
    """The y of an operation that computes x**y; None for any other. (sign counts as x**0.)"""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"]
    squares = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
    return 2 if squares else POWERS.get(eqn.primitive.name)


def mark_of(eqn: Equation) -> str:
    """The name that `jax.ad_checkpoint.checkpoint_name` gives a value by an equation; "" of any other operation."""
    return eqn.params["name"] if eqn.primitive.name == "name" else ""


def takes_whole_ref(eqn: Equation) -> bool:
    """Whether an equation reads, or replaces, all of a mutable array (`ref[...]`), with no index."""
    return kind_of(eqn) == "access" and eqn.params["tree"].num_nodes == 1  # an empty tuple


def _with(word: str) -> frozenset[str]:
    return frozenset(name for name, words in ROWS.items() if word in words)


def _values(word: str) -> dict[str, str]:
    return {name: words[word] for name, words in ROWS.items() if word in words}


def _of(*kinds: Kind) -> frozenset[str]:
    return frozenset(name for name, kind in KINDS.items() if kind in kinds)


# Single operations.

ALL_TO_ALL = "all_to_all"
BARRIER = "optimization_barrier"
BROADCAST = "broadcast_in_dim"
COND = "cond"
CONSTRAINT = "sharding_constraint"
CONVERT = "convert_element_type"
CONVOLUTION = "conv_general_dilated"
DEVICE_PUT = "device_put"
DIV = "div"
DYNAMIC_SLICE = "dynamic_slice"
DYNAMIC_UPDATE_SLICE = "dynamic_update_slice"
GATHER = "gather"
LT = "lt"
MAX = "max"
PAD = "pad"
PLATFORM_INDEX = "platform_index"
PRODUCT = "dot_general"
PSUM = "psum"
REDUCE_SCATTER = "reduce_scatter"
REDUCE_SUM = "reduce_sum"
RESHAPE = "reshape"
RESHARD = "reshard"
REV = "rev"
SCAN = "scan"
SCATTER_ADD = "scatter-add"
SELECT = "select_n"
SHARD_MAP = "shard_map"
SLICE = "slice"
STOP_GRADIENT = "stop_gradient"
SUB = "sub"
TOP_K = "top_k"
TRANSPOSE = "transpose"
WHILE = "while"

# Equations that run an inner program.

INLINED = _with("inlined")
"""Calls that only run their inner program."""

REMAT = _with("remat")
"""Calls that the backward pass recomputes."""

OWN_GRADIENT = _with("own_gradient")
"""Calls with a custom derivative rule. They equal their inner program only if nothing is differentiated."""

OWN_BACKWARD = _with("own_backward")
"""Calls with a custom rule for the backward pass."""

CALLS = _of("call")
"""All calls."""

CONTROL = _of("scan", "while", "cond")
"""Control flow, whose inner programs are followed."""

LOOPS = _of("scan", "while")
"""Loops."""

SOLVES = _of("solve")
"""A linear solve, which holds programs of its own."""

# What operations do to a value.

CASTS = _with("cast")
"""Change only a value's type: the mesh axes over which it varies."""

SAME_NUMBERS = _with("same")
"""Return the same numbers, cast or in another shape."""

WHOLE = _with("whole")
"""Return all numbers of an array, each once: cast, in another shape or order of dims, or marked."""

MOVES = _with("moves")
"""Return numbers of their operands: moved, chosen, rounded or negated."""

NUMBERS = {name: slice(*(int(i) if i else None for i in of.split(":"))) for name, of in _values("numbers").items()}
"""The operands that the result's numbers come from; the others are indices, bounds or predicates."""

ONLY_READS = _with("only_reads")
"""Take mutable arrays without writing to them."""

POINTWISE = _of("pointwise")
"""Each element of the result depends only on the operands' elements at the same index."""

PURE = _with("pure")
"""Depend only on their operands and parameters: equal ones give equal results on every device.

(`regularized_incomplete_beta` iterates until all elements converge, so each depends on all, in its last digits.)
"""

KEEPS_FILL = _with("keeps_fill")
"""Turn an array that holds one number in every element into another such array."""

FILL_IF_ANY = _with("fill_if_any")
"""Reduce equal numbers to that number."""

LINEAR = _with("linear")
"""Are linear in all operands together."""

LINEAR_IN_LAST = _with("linear_in_last")
"""Are linear in their last operand, a cotangent, alone."""

SUMS = _with("sums")
"""Make sums of their operands' elements times constants, for given indices and predicates."""

HOMOGENEOUS = _with("homogeneous")
"""Scaling their `NUMBERS` by c > 0 scales the result by a power of c."""

POWERS = {name: float(Fraction(y)) for name, y in _values("power").items()}
"""Raise to this power."""

MULTIPLIES = _with("multiplies")
"""Multiply their two operands, or divide the first by the second."""

CHOOSES = _with("chooses")
"""Return one of several values, chosen by their first operand."""

ADDS = _with("adds")
"""Add their operands."""

ADDS_UP = _with("adds_up")
"""Add up many numbers, or those of several devices."""

COMPARES = _with("compares")
"""Compare their operands."""

CLIPS = _with("clips")
"""Clip: a clipped gradient still counts as a gradient."""

GUARDS = _with("guards")
"""Keep a divisor from being 0, or test whether it is."""

NOT_NEGATIVE = _with("not_negative")
"""Have no result below 0."""

KEEPS_SIGN = _with("keeps_sign")
"""Have no result below 0 if no operand is."""

NO_GRADIENT = _with("no_gradient")
"""Have a gradient of zero, though their results are floating."""

LINEAR_ALGEBRA = _with("matrices")
"""Operations on whole matrices, batched over the dims before the last two."""

FOURIER = _with("sums") & _of("trailing")
"""Fourier transforms."""

RESHAPES = _of("reshape", "squeeze")
"""Return an array in another shape."""

SIZES = _values("sizes")
"""The parameter that holds the sizes, dim by dim, of an operation's result or of the slices that it reads."""

# Devices, random numbers, the host.

ALL_REDUCES = _with("all_reduces")
"""Give all devices along their `axes` the same result."""

DIFFERS = _with("differs")
"""Give devices along a mesh axis different results, even from equal operands."""

GATHERS = _with("gathers")
"""Put the parts of all devices along a mesh axis together."""

OVER_DEVICES = _values("then")
"""The collective that takes this maximum or minimum over all devices."""

COLLECTIVE_KINDS = _values("sent")
"""The kind (`inspect.Collective.kind`) of each collective primitive of the local view."""

READS_KEYS = _with("reads_keys")
"""Read integers as the state of a random generator."""

DRAWS = _with("draws")
"""Make random numbers."""

SEVERAL = _with("several")
"""Make several numbers or keys from each key."""

UNPARTITIONED = _with("unpartitioned")
"""What XLA cannot split over devices: it must run on each device's part, or be left whole."""

DEBUGGING = _with("debugging")
"""Show values to the host, on each device that computes them; no value depends on it."""

# Costs of operations, for `jaxshard.plan`.

FUSED = _with("fused")
"""Work element by element, or by index alone; the compiler fuses them into the operation that reads the result."""

CUMULATIVE = _of("cumulative")
"""Run along one dim, with a result for each index in it."""

REDUCTIONS = _with("reduces")
"""Reduce many numbers to few, or to running totals."""

UPDATES = _with("overwrites")
"""Write into their first operand."""

PICKS = _with("picks")
"""Read only the elements that they return, at indices given by other operands."""

CUTS = _with("cuts")
"""Return a slice of an array, with all its dims."""

MEMORYLESS = _with("memoryless")
"""Read almost no memory, so compilers fuse them into every reader, even several."""

PRODUCTS = _with("product")
"""Matrix products and convolutions. On TPU both take bfloat16 where their precision is the default."""

PASSED_TO_PRODUCTS = _with("passed_on")
"""Pass a value on to a product; XLA for TPU may narrow its dtype on the way."""

VIEWS = _with("view")
"""Return another view of the same memory; no bytes move."""

FUSED_INTO = {PRODUCT: _with("into_dot"), CONVOLUTION: _with("into_conv")}
"""Operations that every compiler fuses into a product that reads their result. A convolution takes only `rev`, for a
reversed kernel: fused work would be repeated at each position of its window."""
