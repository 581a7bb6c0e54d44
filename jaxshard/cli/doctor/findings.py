"""What `jaxshard doctor` finds, and what its rules ask about the machine."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias


class Finding(NamedTuple):
    """Something that was found, with a line of advice.

    Attributes:
        what: what it is about, such as "NCCL_DEBUG=INFO".
        wrong: whether it hurts; else it is only told.
        advice: what it means, and what to do.
        source: where that is written; "" where it was found here.
    """

    what: str
    wrong: bool
    advice: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Here:
    """The machine, as rules see it.

    Attributes:
        platform: JAX's: "cpu", "gpu" or "tpu"; "" where it finds no devices.
        num_devices: of this process.
        cores: of the processor.
        accelerators: "gpu", "tpu": that are in the machine, whether JAX uses them or not.
        interfaces: names of network interfaces.
        own_flags: names of XLA's flags that jaxshard sets itself on this platform.
    """

    platform: str = "cpu"
    num_devices: int = 1
    cores: int = 1
    accelerators: Collection[str] = ()
    interfaces: Collection[str] = ()
    own_flags: Collection[str] = ()


Environment: TypeAlias = Mapping[str, str]
Verdict: TypeAlias = tuple[bool, str] | None  # whether it hurts, and the advice; None: there is nothing to say
Judge: TypeAlias = Callable[[str, Here, Environment], Verdict]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is to be said of a variable that is set, or of a flag.

    Attributes:
        names: of variables or flags.
        judge: says it, from the value, the machine and the whole environment.
        source: where that is written.
        platforms: those on which it matters.
    """

    names: tuple[str, ...]
    judge: Judge
    source: str
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu", "")
