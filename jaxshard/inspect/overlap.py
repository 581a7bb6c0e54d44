"""What the schedule of a compiled program places between an asynchronous collective's start and its done."""

import itertools
import re

from jaxshard.inspect import hlo

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COMPUTE = {"fusion", "dot", "convolution", "custom-call", "while", "call", "conditional", "map", "fft"} | {
    *("reduce", "reduce-window", "select-and-scatter", "sort", "scatter", "gather", "cholesky", "triangular-solve")
}
_IDLE_CALL = re.compile(r'custom_call_target="(?:AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound)"')


def overlapped(module: hlo.Module, computation: str, start: hlo.Instruction) -> tuple[str, ...] | None:
    """Names of the compute instructions between `start` and its done; None if it starts nothing asynchronous."""
    chain = _chain(_inside(module, start))
    if not (start.opcode.endswith("-start") or (chain and _calls(_inside(module, start), "AsyncCollectiveStart"))):
        return None
    if '"is_sync":true' in start.attributes:
        return None
    carried, found = {start.name}, []  # carried: the values that pass the running operation on to its done
    schedule = itertools.dropwhile(lambda i: i.name != start.name, module.computations[computation].values())
    for instruction in itertools.islice(schedule, 1, None):
        inside = _inside(module, instruction)
        if not carried.isdisjoint(instruction.operand_names):
            if instruction.opcode.endswith("-done") or (
                _chain(inside) == chain and _calls(inside, "AsyncCollectiveDone")
            ):
                break
            if instruction.opcode in ("get-tuple-element", "async-update") or (chain and _chain(inside) == chain):
                carried.add(instruction.name)
        if _computes(module, computation, instruction):
            found.append(instruction.name)
    return tuple(found)


def _computes(module: hlo.Module, computation: str, instruction: hlo.Instruction) -> bool:
    """Whether it computes on arrays: not a loop counter, and not a fusion that only contains a collective."""
    if instruction.opcode not in _COMPUTE or _IDLE_CALL.search(instruction.attributes):
        return False
    made = module.computations[computation]
    operands = [made[name] for name in instruction.operand_names if name in made]
    if not any(re.search(r"\[\d", i.shape) for i in (instruction, *operands)):
        return False
    inside = _inside(module, instruction)
    if not any(i.opcode in COLLECTIVES for i in inside):
        return True
    return _chain(inside) is not None and any(i.opcode in _COMPUTE - {"custom-call"} for i in inside)


def _inside(module: hlo.Module, instruction: hlo.Instruction) -> list[hlo.Instruction]:
    """The instructions of a fusion."""
    callees = instruction.called("calls") if instruction.opcode == "fusion" else []
    return [inner for callee in callees for inner in module.computations.get(callee, {}).values()]


def _chain(inside: list[hlo.Instruction]) -> tuple[str, ...] | None:
    """What all copies of a collective have in common: TPU spreads one over a chain of fusions, with a copy in each."""
    for i in inside:
        if i.opcode in COLLECTIVES and "async_collective_fusion_config" in i.attributes:
            return i.opcode, *re.findall(r'\b(?:channel_id|chain_id)="?\d+', i.attributes)
    return None


def _calls(inside: list[hlo.Instruction], target: str) -> bool:
    return any(f'custom_call_target="{target}"' in i.attributes for i in inside)
