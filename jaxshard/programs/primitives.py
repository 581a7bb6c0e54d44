"""What holds for JAX's primitives: lists and questions, which all follow from the one `table`.

A primitive that JAX does not have is in no table. It may say of itself, by two parameters of its equations (`bind`),
what its other parameters do not show:

  mixed_dims         it works on so many of the last dims as a whole, for each index of the dims before;
  flops_per_element  multiplications and additions in it, for each element of its first operand.
"""

from fractions import Fraction

from jaxshard.base.types import Equation
from jaxshard.programs.table import KINDS, ROWS, Kind


def kind_of(eqn: Equation) -> Kind | None:
    """The kind of an operation; None: nobody knows."""
    return KINDS.get(eqn.primitive.name) or ("trailing" if "mixed_dims" in eqn.params else None)


def mixed_dims(eqn: Equation) -> int:
    """How many of the last dims an operation of the kind "trailing" works on as a whole."""
    return len(eqn.params["fft_lengths"]) if "fft_lengths" in eqn.params else eqn.params.get("mixed_dims", 2)


def power_of(eqn: Equation) -> float | None:
    """The y of an operation that gives x**y; None of any other. (The sign's is 0.)"""
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


# Single operations, which have parameters of their own.

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
MAX = "max"
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
STOP_GRADIENT = "stop_gradient"
SUB = "sub"
TRANSPOSE = "transpose"
WHILE = "while"

# Equations that run an inner program.

INLINED = _with("inlined")
"""Calls that only run their inner program."""

REMAT = _with("remat")
"""Calls that the backward pass recomputes."""

OWN_GRADIENT = _with("own_gradient")
"""Calls whose derivatives a user's rule makes. They equal their inner program only where nothing is differentiated."""

OWN_BACKWARD = _with("own_backward")
"""Those of them whose rule is one for the backward pass."""

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
"""Return numbers of their operands: moved, chosen, rounded, or with the other sign."""

NUMBERS = {name: slice(*(int(i) if i else None for i in of.split(":"))) for name, of in _values("numbers").items()}
"""The operands whose numbers the result is made of, where others are indices, bounds or predicates."""

ONLY_READS = _with("only_reads")
"""Take mutable arrays, and write to none."""

POINTWISE = _of("pointwise")
"""Each element of the result depends only on the operands' elements at the same index."""

PURE = _with("pure")
"""Depend on their operands and parameters alone: equal ones give equal results on every device.

(`regularized_incomplete_beta` goes on until all elements converge, so that each depends on all, in its last digits.)
"""

KEEPS_FILL = _with("keeps_fill")
"""Turn an array that holds one number in every element into another such array."""

FILL_IF_ANY = _with("fill_if_any")
"""Reduce equal numbers to that number."""

LINEAR = _with("linear")
"""Are linear in all operands together."""

SUMS = _with("sums")
"""Make sums of their operands' elements times constants, for given indices and predicates."""

HOMOGENEOUS = _with("homogeneous")
"""Turn a positive factor of what their `NUMBERS` are into a power of it."""

POWERS = {name: float(Fraction(y)) for name, y in _values("power").items()}
"""Raise to this power."""

MULTIPLIES = _with("multiplies")
"""Multiply their two operands, or divide the first by the second."""

CHOOSES = _with("chooses")
"""Return one of several values, as their first operand says."""

ADDS = _with("adds")
"""Add their operands."""

ADDS_UP = _with("adds_up")
"""Add up many numbers, or those of several devices."""

COMPARES = _with("compares")
"""Compare their operands."""

CLIPS = _with("clips")
"""Clip: a gradient that is clipped is one still."""

GUARDS = _with("guards")
"""Keep a divisor from being 0, or test whether it is."""

NOT_NEGATIVE = _with("not_negative")
"""Make no number below 0."""

KEEPS_SIGN = _with("keeps_sign")
"""Make no number below 0 of numbers that are not."""

NO_GRADIENT = _with("no_gradient")
"""Have a gradient of zero, though their results are floating."""

LINEAR_ALGEBRA = _with("matrices")
"""Operations on whole matrices, batched over the dims before the last two."""

FOURIER = _with("sums") & _of("trailing")
"""Fourier transforms."""

RESHAPES = _of("reshape", "squeeze")
"""Return an array in another shape."""

SIZES = _values("sizes")
"""The parameter that has the sizes of an operation's result, or of what it takes, dim by dim."""

# Devices, random numbers, the host.

ALL_REDUCES = _with("all_reduces")
"""Give all devices along their `axes` one result, whatever each of them had."""

DIFFERS = _with("differs")
"""Give each device along a mesh axis another result, also where all operands are equal on all."""

GATHERS = _with("gathers")
"""Put the parts of all devices along a mesh axis together."""

OVER_DEVICES = _values("then")
"""The collective that takes this maximum or minimum over all devices."""

COLLECTIVE_KINDS = _values("sent")
"""The kind (`inspect.Collective.kind`) of each collective primitive of the local view."""

READS_KEYS = _with("reads_keys")
"""Take whole numbers for the state of a random generator."""

DRAWS = _with("draws")
"""Make random numbers."""

SEVERAL = _with("several")
"""Make several numbers, or several keys, of each key."""

DEBUGGING = _with("debugging")
"""Call the host for a look at values, on each device that computes them; nothing depends on that."""

# What operations cost; `jaxshard.plan` asks.

FUSED = _with("fused")
"""Work element by element, or by index alone; the compiler fuses them into the operation that reads the result."""

CUMULATIVE = _of("cumulative")
"""Run along one dim, and have a result for each place in it."""

REDUCTIONS = _with("reduces")
"""Make few numbers of many, or one of all before it."""

UPDATES = _with("overwrites")
"""Write into their first operand."""

PICKS = _with("picks")
"""Read no more than they return, wherever other operands say."""

CUTS = _with("cuts")
"""Return a part of an array, with all dims."""

MEMORYLESS = _with("memoryless")
"""Read almost no memory, so they are fused into every reader, even where there are several."""

PRODUCTS = _with("product")
"""Matrix products and convolutions. On TPU both take bfloat16 where their precision is the default."""

PASSED_TO_PRODUCTS = _with("passed_on")
"""Pass a value on to a product; XLA for TPU may narrow its dtype on the way."""

VIEWS = _with("view")
"""Return another view of the same memory; no bytes move."""

FUSED_INTO = {PRODUCT: _with("into_dot"), CONVOLUTION: _with("into_conv")}
"""What every compiler makes part of a product that reads its result; a convolution can read its kernel backwards. Other
work is not done again at each place of a convolution's window.
"""
