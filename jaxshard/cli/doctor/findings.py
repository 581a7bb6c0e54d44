"""The findings of `jaxshard doctor`, and the facts about the machine that its rules use."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias


class Finding(NamedTuple):
    """A fact with a line of advice.

    Attributes:
        what: the subject, such as "NCCL_DEBUG=INFO".
        wrong: whether it does harm; otherwise it is only information.
        advice: what it means, and what to do.
        source: of the advice; "" if we found it ourselves.
    """

    what: str
    wrong: bool
    advice: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Here:
    """The machine, as rules see it.

    Attributes:
        platform: JAX's: "cpu", "gpu" or "tpu"; "" if JAX finds no devices.
        num_devices: of this process.
        cores: of the CPU.
        accelerators: "gpu", "tpu": those in the machine, whether JAX uses them or not.
        interfaces: names of network interfaces.
        own_flags: names of XLA's flags that jaxshard sets on this platform.
    """

    platform: str = "cpu"
    num_devices: int = 1
    cores: int = 1
    accelerators: Collection[str] = ()
    interfaces: Collection[str] = ()
    own_flags: Collection[str] = ()


Environment: TypeAlias = Mapping[str, str]
Verdict: TypeAlias = tuple[bool, str] | None  # (whether it does harm, the advice); None: nothing to say
Judge: TypeAlias = Callable[[str, Here, Environment], Verdict]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Judges a variable or flag that is set.

    Attributes:
        names: of variables or flags.
        judge: makes the verdict from the value, the machine and the whole environment.
        source: of the advice.
        platforms: on which it matters.
    """

    names: tuple[str, ...]
    judge: Judge
    source: str
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu", "")
