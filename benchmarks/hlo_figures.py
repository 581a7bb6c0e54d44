"""Figures of a compiled step: peak, wire, what the schedule overlaps with matrix products, bytes of other kernels."""

import dataclasses
import re

import jax

from jaxshard.inspect import hlo, traffic

_MB = 1e6
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "iota", "add-dependency"}
_PRODUCT = re.compile(r'custom_call_target="(?:__cublas|__cudnn)|__triton_gemm|__triton_nested_gemm|__cudnn')


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one step, per device.

    Attributes:
      peak: arguments + outputs + scratch - aliases, in MB.
      wire: MB sent.
      covered: MB of the collectives' payload whose collective has a matrix product between its start and its done.
      payload: MB of all collectives' payload.
      num_covered, num_collectives: how many collectives these are, as the program lists them.
      traffic: GB that kernels other than matrix products and collectives read and write.
    """

    peak: float
    wire: float
    covered: float
    payload: float
    num_covered: int
    num_collectives: int
    traffic: float

    @property
    def exposed(self) -> float:
        """MB of payload that no matrix product covers."""
        return self.payload - self.covered

    def __str__(self) -> str:
        beside = f"{self.num_covered} of {self.num_collectives}, {self.covered:.0f} of {self.payload:.0f} MB"
        return f"peak {self.peak:.0f} MB, wire {self.wire:.0f} MB, covered {beside}, traffic {self.traffic:.1f} GB"


def figures(compiled: jax.stages.Compiled) -> Figures:
    """The figures of a compiled program."""
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    text = compiled.as_text()
    module = hlo.parse(text)
    found = [c for c in traffic.collectives(text) if c.group_size > 1]
    made = {name: i for instructions in module.computations.values() for name, i in instructions.items()}
    beside = [c for c in found if any(is_product(module, made[name]) for name in c.overlapped or ())]
    return Figures(
        peak / _MB,
        sum(c.wire_bytes for c in found) / _MB,
        sum(c.bytes * c.trips for c in beside) / _MB,
        sum(c.bytes * c.trips for c in found) / _MB,
        len(beside),
        len(found),
        _traffic(module, module.entry, 1) / 1e9,
    )


def is_product(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a matrix product, or holds one."""
    if instruction.opcode in ("dot", "convolution"):
        return True
    if _PRODUCT.search(instruction.attributes):
        return True
    callees = instruction.called("calls", "body", "to_apply", "called_computations", "branch_computations")
    return any(is_product(module, i) for c in callees for i in module.computations.get(c, {}).values())


def _traffic(module: hlo.Module, computation: str, trips: int) -> float:
    """Bytes that kernels read and write, without matrix products and collectives."""
    total = 0.0
    made = module.computations[computation]
    for instruction in made.values():
        if instruction.opcode == "while":
            count = hlo.trip_count(module, computation, instruction) or 1
            (body,) = instruction.called("body")
            total += _traffic(module, body, trips * count)
        elif instruction.opcode in ("call", "conditional"):
            for callee in instruction.called("to_apply", "branch_computations"):
                total += _traffic(module, callee, trips)
        elif not _is_free(instruction) and not is_product(module, instruction):
            total += trips * _bytes_moved(module, made, instruction)
    return total


def _is_free(instruction: hlo.Instruction) -> bool:
    name = instruction.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    return name in _FREE or name in hlo.COLLECTIVES or name in ("async", "copy-done", "custom-call")


def _bytes_moved(module: hlo.Module, made: dict[str, hlo.Instruction], instruction: hlo.Instruction) -> float:
    """Bytes read and written; a slice of an operand counts as the slice, an update in place as the update."""
    written = hlo.bytes_of(instruction.shape)[0]
    operands = [made[name] for name in instruction.operand_names if name in made]
    if instruction.opcode != "fusion":
        return written + sum(hlo.bytes_of(i.shape)[0] for i in operands)
    inside = module.computations[instruction.called("calls")[0]]
    params = {int(i.operands): name for name, i in inside.items() if i.opcode == "parameter"}
    read = 0.0
    for number, operand in enumerate(operands):
        size = hlo.bytes_of(operand.shape)[0]
        readers = [i for i in inside.values() if params[number] in i.operand_names]
        if readers and all(i.opcode in ("dynamic-slice", "slice", "gather") for i in readers):
            size = min(size, sum(hlo.bytes_of(i.shape)[0] for i in readers))
        updated = [i for i in readers if i.opcode == "dynamic-update-slice" and i.operand_names[0] == params[number]]
        if updated and len(updated) == len(readers):
            update = sum(hlo.bytes_of(inside[i.operand_names[1]].shape)[0] for i in updated)
            written -= size - update
            size = 0
        read += size
    return max(written, 0) + read
