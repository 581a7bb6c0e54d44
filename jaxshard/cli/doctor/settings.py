"""Settings of the environment that hurt a training or help it."""

from collections.abc import Iterator

from jaxshard.cli.doctor.findings import Environment, Finding, Here
from jaxshard.cli.doctor.setting_rules import FLAGS, FRACTIONS, VARIABLES

_PREFIXES = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "TPU_", "CUDA_")


def judged(environment: Environment, here: Here) -> list[Finding]:
    """What there is to say of the variables that are set, of XLA's flags, and of what is not set but matters here."""
    found = list(_of_variables(environment, here))
    return [*found, *_of_flags(environment, here), *_unset(environment, here)]


def others(environment: Environment, found: list[Finding]) -> list[str]:
    """Names of variables of JAX, XLA and their libraries that are set, and of which nothing is said."""
    told = {each.what.partition("=")[0] for each in found}
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in told)


def _of_variables(environment: Environment, here: Here) -> Iterator[Finding]:
    for rule in VARIABLES:
        for name in rule.names:
            if name in environment and here.platform in rule.platforms:
                verdict = rule.judge(environment[name].strip(), here, environment)
                if verdict:
                    yield Finding(f"{name}={environment[name]}", *verdict, rule.source)


def flags_in(text: str) -> dict[str, str]:
    """XLA's flags and their values; a flag without one is true. (Without a flag, it is the name of a file.)

    >>> flags_in("--xla_dump_to=/x --xla_gpu_deterministic_ops")
    {'xla_dump_to': '/x', 'xla_gpu_deterministic_ops': 'true'}
    """
    words = [word.lstrip("-").partition("=") for word in text.split() if word.startswith("-")]
    return {name: value if equals else "true" for name, equals, value in words}


def _of_flags(environment: Environment, here: Here) -> Iterator[Finding]:
    for name, value in flags_in(environment.get("XLA_FLAGS", "")).items():
        what = f"XLA_FLAGS=--{name}={value}"
        if name in here.own_flags:
            cure = "give train_step(compiler_options=...) yours"
            yield Finding(what, True, f"jaxshard sets this for its steps, and its value wins: {cure}", _OPTIONS)
        for rule in FLAGS:
            if name in rule.names and here.platform in rule.platforms:
                verdict = rule.judge(value, here, environment)
                if verdict:
                    yield Finding(what, *verdict, rule.source)


_OPTIONS = "docs/compiler_options.md"


def _unset(environment: Environment, here: Here) -> Iterator[Finding]:
    """What is not set, where that matters."""
    if here.platform in ("gpu", "tpu") and not environment.get("JAX_COMPILATION_CACHE_DIR"):
        advice = "each start compiles anew; a folder there keeps compiled programs"
        yield Finding("JAX_COMPILATION_CACHE_DIR", False, advice, "docs.jax.dev, persistent compilation cache")
    if here.platform == "gpu" and not any(map(environment.get, FRACTIONS)):
        advice = "JAX takes 75% of a GPU's memory when it starts; .9 leaves more for large models"
        yield Finding(FRACTIONS[0], False, advice, "docs.jax.dev, GPU memory allocation")
    wanted = 2 * here.num_devices
    if here.platform == "cpu" and here.num_devices > 1 and "NPROC" not in environment and here.cores < wanted:
        advice = f"`jaxshard train` sets {wanted}; programs of your own need it for optimizers such as Muon and SOAP"
        yield Finding("NPROC", False, advice, "jaxshard/optimizer/owners/owners.py")
