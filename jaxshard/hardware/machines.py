"""Machines by name: a chip and how many of it, "v5e:2x4", "v5p:8x8x8", "h100:4x8" (4 nodes of 8), "cpu:8"."""

import dataclasses
import math
import re

from jaxshard.hardware.chips import CHIPS, Chip, nearest

_GPU_EXAMPLES = "{0}:8 (a node of 8), {0}:4x8 (4 nodes of 8)"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that one program runs on.

    Attributes:
        name: as given to `machine`.
        chip: the figures of each device.
        shape: the TPU torus, (nodes, GPUs of a node) or (GPUs,), or (devices,) of a CPU.
        num_devices: the product of `shape`. (JAX sees one device per chip, of v4 and v5p too.)
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_devices: int


def machine(name: str) -> Machine:
    """The machine of that name.

    Args:
        name: a chip (`chips.CHIPS`) and a shape: "v5e:2x4" and "v6e:16x16" (2-D torus), "v4:4x4x4" and "v5p:8x8x8" (3-D
            torus), "h100:8" (one node), "h100:4x8" (4 nodes of 8), "cpu:8" (simulated devices).

    Raises:
        ValueError: if the chip is not known, or no machine with it has that shape.

    >>> machine("h100:4x8").num_devices
    32
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", str(name))
    if not found or found[1] not in CHIPS:
        known = "; ".join(examples(known) for known in CHIPS)
        raise ValueError(f"machine: {name!r} {_misnomer(str(name))}; there are: {known}")
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    wrong = _misfit(chip, shape)
    if wrong:
        raise ValueError(f"machine: {name!r} {wrong}; write, for example, {examples(chip.name)}")
    return Machine(name, chip, shape, math.prod(shape))


def examples(chip: str) -> str:
    """Names of machines with this chip, for messages.

    >>> examples("v5p")
    'v5p:2x2x1, v5p:8x8x8'
    """
    return ", ".join(CHIPS[chip].machines) or _GPU_EXAMPLES.format(chip)


def _misnomer(name: str) -> str:
    """What is wrong with a name that cannot be read."""
    chip = name.partition(":")[0]
    if chip in CHIPS or not re.fullmatch(r"\w*[a-zA-Z]\w*", chip):
        return "is no chip and shape"
    likely = nearest(chip)
    return f"has an unknown chip, {chip!r}" + (f" (did you mean {likely}?)" if likely else "")


def _misfit(chip: Chip, shape: tuple[int, ...]) -> str:
    """What is wrong with a shape, or ""."""
    if chip.platform == "tpu":
        if len(shape) != chip.torus_dims:
            return f"has {len(shape)} dims; {chip.name} chips are joined in {chip.torus_dims} dims"
        if math.prod(shape) > chip.domain_size:
            return f"has {math.prod(shape)} chips; a {chip.name} pod has at most {chip.domain_size}"
    elif chip.platform == "gpu":
        if len(shape) > 2:
            return f"has {len(shape)} dims; give nodes x GPUs of a node, or the GPUs of one node"
        if (size := shape[len(shape) - 1]) > chip.domain_size:
            return f"has {size} GPUs in a node; a node has at most {chip.domain_size}"
    elif len(shape) > 1:
        return f"has {len(shape)} dims; give the number of simulated devices"
    return ""
