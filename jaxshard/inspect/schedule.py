"""Which collectives a compiled step's schedule overlaps with matrix products, and the bytes its other kernels move."""

import dataclasses
import re

import jax

from jaxshard.inspect import hlo, traffic

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "iota", "add-dependency"}
_PRODUCT = re.compile(r'custom_call_target="(?:__cublas|__cudnn)|__triton_gemm|__triton_nested_gemm|__cudnn')


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of one step, per device.

    Attributes:
      payload_bytes: the payload of all collectives, times their trips.
      covered_bytes: the payload of collectives with a matrix product between their start and done.
      num_collectives: the collectives in the program; one in a loop counts once.
      num_covered: those with a matrix product between their start and done.
      kernel_bytes: bytes that kernels other than matrix products and collectives read and write.
      exposed: the collectives without a matrix product between their start and done, in program order.
    """

    payload_bytes: float
    covered_bytes: float
    num_collectives: int
    num_covered: int
    kernel_bytes: float
    exposed: tuple[traffic.Collective, ...] = ()


def schedule(compiled_or_text: jax.stages.Compiled | str) -> Schedule:
    """Reads a compiled program's schedule. XLA for CPU never overlaps collectives.

    Args:
        compiled_or_text: `step.lower(...).compile()`, for any platform, or its `as_text()`.

    Returns:
        A `Schedule`.

    Raises:
        TypeError, ValueError: as `collectives`.
    """
    text = traffic.text_of(compiled_or_text)
    module = hlo.parse(text)
    found = [c for c in traffic.collectives(text) if c.group_size > 1]
    made = {name: i for instructions in module.computations.values() for name, i in instructions.items()}
    covered = [c for c in found if any(_is_product(module, made[name]) for name in c.overlapped or ())]
    return Schedule(
        payload_bytes=sum(c.bytes * c.trips for c in found),
        covered_bytes=sum(c.bytes * c.trips for c in covered),
        num_collectives=len(found),
        num_covered=len(covered),
        kernel_bytes=_kernel_bytes(module, module.entry, 1),
        exposed=tuple(c for c in found if c not in covered),
    )


def _is_product(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction is, or contains, a matrix product."""
    if instruction.opcode in ("dot", "convolution"):
        return True
    if _PRODUCT.search(instruction.attributes):
        return True
    callees = instruction.called("calls", "body", "to_apply", "called_computations", "branch_computations")
    return any(_is_product(module, i) for c in callees for i in module.computations.get(c, {}).values())


def _kernel_bytes(module: hlo.Module, computation: str, trips: int) -> float:
    """Bytes that kernels other than matrix products and collectives read and write."""
    total = 0.0
    made = module.computations[computation]
    for instruction in made.values():
        if instruction.opcode == "while":
            count = hlo.trip_count(module, computation, instruction) or 1
            (body,) = instruction.called("body")
            total += _kernel_bytes(module, body, trips * count)
        elif instruction.opcode in ("call", "conditional"):
            for callee in instruction.called("to_apply", "branch_computations"):
                total += _kernel_bytes(module, callee, trips)
        elif not _is_free(instruction) and not _is_product(module, instruction):
            total += trips * _bytes_moved(module, made, instruction)
    return total


def _is_free(instruction: hlo.Instruction) -> bool:
    name = instruction.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    return name in _FREE or name in traffic.COLLECTIVES or name in ("async", "copy-done", "custom-call")


def _bytes_moved(module: hlo.Module, made: dict[str, hlo.Instruction], instruction: hlo.Instruction) -> float:
    """Bytes read and written by one kernel."""
    written = float(hlo.bytes_of(instruction.shape)[0])
    operands = [made[name] for name in instruction.operand_names if name in made]
    if instruction.opcode != "fusion":
        return written + sum(hlo.bytes_of(i.shape)[0] for i in operands)
    inside = module.computations[instruction.called("calls")[0]]
    params = {int(i.operands): name for name, i in inside.items() if i.opcode == "parameter"}
    read = 0.0
    for number, operand in enumerate(operands):
        size, saved = _bytes_used(inside, params[number], hlo.bytes_of(operand.shape)[0])
        read, written = read + size, written - saved
    return max(written, 0.0) + read


def _bytes_used(inside: dict[str, hlo.Instruction], name: str, size: int) -> tuple[float, float]:
    """(bytes that a fusion reads of an operand, bytes of its result that reuse the operand and are not written).

    Of a slice, only the sliced part counts; of an update in place, only the update.
    """
    readers = [i for i in inside.values() if name in i.operand_names]
    if readers and all(i.opcode in ("dynamic-slice", "slice", "gather") for i in readers):
        return min(size, sum(hlo.bytes_of(i.shape)[0] for i in readers)), 0.0
    updated = [i for i in readers if i.opcode == "dynamic-update-slice" and i.operand_names[0] == name]
    if updated and len(updated) == len(readers):
        return 0.0, size - sum(hlo.bytes_of(inside[i.operand_names[1]].shape)[0] for i in updated)
    return size, 0.0
