"""A rule for each setting that harms or helps training, with its source."""

from jaxshard.cli.doctor.findings import Environment, Here, Judge, Rule, Verdict

_JAX = "docs.jax.dev, configuration options"
_MEMORY = "docs.jax.dev, GPU memory allocation"
_NCCL = "docs.nvidia.com, NCCL environment variables"
_CUDA = "docs.nvidia.com, CUDA environment variables"
_XLA = "openxla.org, XLA flags"
_HOSTS, _OPTIONS = "docs/multihost.md", "docs/compiler_options.md"
_GPU, _CHIPS = ("gpu",), ("gpu", "tpu")
COORDINATES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def is_yes(value: str) -> bool:
    """Whether JAX reads a value as true; XLA and NCCL know fewer words for it.

    >>> [is_yes(value) for value in ("1", "True", "0", "")]
    [True, True, False, False]
    """
    return value.lower() in ("y", "yes", "t", "true", "on", "1")


def _set(advice: str, *, wrong: bool = False) -> Judge:
    return lambda value, here, environment: (wrong, advice) if value else None


def _yes(advice: str, *, wrong: bool = True) -> Judge:
    return lambda value, here, environment: (wrong, advice) if is_yes(value) else None


def _platforms(value: str, here: Here, environment: Environment) -> Verdict:
    named = [name.strip() for name in value.lower().split(",")]
    if "gpu" in named:
        return True, "gpu stands for cuda, rocm and oneapi, and JAX fails if one of them is missing: write cuda"
    unused = [kind for kind in here.accelerators if {"gpu": "cuda"}.get(kind, kind) not in named]
    if value and unused:
        kind = unused[0].upper()
        return True, f"it hides this machine's {kind} from JAX: unset it to use the {kind}"
    return (False, "JAX uses only these backends") if value else None


def _platform_name(value: str, here: Here, environment: Environment) -> Verdict:
    if value.lower() == "cpu" and here.accelerators:
        return True, "programs run on the CPU, although this machine has an accelerator: unset it"
    return None


def _cache(value: str, here: Here, environment: Environment) -> Verdict:
    if value and here.platform == "cpu" and here.num_devices > 1:
        return True, "simulated devices can hang or abort with cached programs: unset it"
    return (False, "compiled programs are cached there") if value else None


def _threads(value: str, here: Here, environment: Environment) -> Verdict:
    wanted = 2 * here.num_devices
    if here.num_devices == 1 or not value.isdigit() or int(value) >= wanted:
        return None
    return True, f"XLA has too few threads, so simulated devices may hang: set NPROC={wanted}"


def _old_fraction(value: str, here: Here, environment: Environment) -> Verdict:
    if value and environment.get(FRACTIONS[0]):
        return True, f"JAX fails if {FRACTIONS[0]} is set too: unset this one, the old name"
    return _fraction(value, here, environment)


def _fraction(value: str, here: Here, environment: Environment) -> Verdict:
    try:
        part = float(value or ".75")
    except ValueError:
        return True, "JAX fails because this is not a number: give a fraction of the memory, such as .9"
    if not 0 < part <= 0.95:
        return True, "CUDA, cuDNN and NCCL need some memory of their own: give more than 0 and at most .95"
    if part < 0.5:
        return True, f"JAX uses only {part:.0%} of a GPU's memory: raise it, unless programs share the GPU"
    return False, f"JAX reserves {part:.0%} of a GPU's memory when it starts"


def _preallocate(value: str, here: Here, environment: Environment) -> Verdict:
    if value not in ("false", "False", "0"):
        return None
    return True, "memory becomes fragmented, and a large model may not fit: unset it, unless programs share the GPU"


def _allocator(value: str, here: Here, environment: Environment) -> Verdict:
    slow = value.lower() == "platform"
    return (True, "the driver allocates each array, which is very slow: unset it") if slow else None


def _visible(value: str, here: Here, environment: Environment) -> Verdict:
    if "gpu" not in here.accelerators:
        return None
    if value.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return True, "it hides all GPUs: unset it, or list some, such as 0,1"
    return False, "JAX sees only these GPUs"


def _libraries(value: str, here: Here, environment: Environment) -> Verdict:
    if not any(name in value.lower() for name in ("cuda", "cudnn", "nccl")):
        return None
    return False, "these libraries take precedence over those that pip installed: unset it if JAX fails to start"


def _disabled(advice: str) -> Judge:
    return lambda value, here, environment: (True, advice) if value.isdigit() and int(value) else None


def _distance(value: str, here: Here, environment: Environment) -> Verdict:
    if value.upper() in ("LOC", "0"):
        return True, "GPUs never send to each other directly: unset it"
    return False, _BY_HAND


def _interfaces(value: str, here: Here, environment: Environment) -> Verdict:
    if value.startswith("^"):
        return False, "NCCL does not use these network interfaces"
    exact, names = value.startswith("="), [name.strip() for name in value.lstrip("=").split(",") if name.strip()]
    known = [name for name in here.interfaces if any(name == one if exact else name.startswith(one) for one in names)]
    if known or not here.interfaces:
        return False, "NCCL uses only these network interfaces"
    return True, f"this network interface does not exist: use one of {', '.join(sorted(here.interfaces))}"


def _prints(value: str, here: Here, environment: Environment) -> Verdict:
    many = value.upper() in ("INFO", "TRACE")
    return (False, "NCCL prints many lines: set it to WARN once everything works") if many else None


def _together(value: str, here: Here, environment: Environment) -> Verdict:
    lacking = [name for name in COORDINATES if not environment.get(name)]
    if lacking:
        return True, f"{' and '.join(lacking)} must be set, too: give all three, or none to detect them automatically"
    unread = [name for name in COORDINATES[1:] if not environment[name].strip().isdigit()]
    if unread:
        return True, f"{unread[0]} must be an integer"
    return False, "only this process was checked; it did not join the others"


def _first_of(names: tuple[str, ...]) -> Judge:
    """`_together`, only for the first of the variables that is set."""
    return lambda value, here, environment: (
        None if any(map(environment.get, names)) else _together("", here, environment)
    )


def _proxy(value: str, here: Here, environment: Environment) -> Verdict:
    host = environment.get(COORDINATES[0], "").rpartition(":")[0]
    if not value or not host or host in environment.get("no_proxy", "").split(","):
        return None
    return True, f"processes look for {host} through this proxy: unset it, or add {host} to no_proxy"


def _async_fusion(value: str, here: Here, environment: Environment) -> Verdict:
    if "xla_tpu_enable_async_collective_fusion=true" in value:
        return False, "xla_tpu_enable_async_collective_fusion reduces the overlap of collectives: remove it"
    return (False, "the TPU compiler uses these flags") if value else None


_BY_HAND = "it overrides NCCL's own choice: unset it, unless you measured that it helps"
_SEARCH = "a debugging option, which slows tracing or steps down: unset it after debugging"

VARIABLES: tuple[Rule, ...] = (
    Rule(("JAX_PLATFORMS",), _platforms, _JAX),
    Rule(("JAX_PLATFORM_NAME",), _platform_name, _JAX),
    Rule(("JAX_ENABLE_X64",), _yes("arrays have 64 bits by default, twice the memory: unset it"), _JAX),
    Rule(("JAX_DISABLE_JIT",), _yes("nothing is compiled, which is very slow: unset it"), _JAX),
    Rule(("JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_CHECK_TRACER_LEAKS", "JAX_ENABLE_CHECKS"), _yes(_SEARCH), _JAX),
    Rule(("JAX_DISABLE_MOST_OPTIMIZATIONS",), _yes("XLA skips most optimizations: unset it"), _JAX),
    Rule(("JAX_COMPILATION_CACHE_DIR",), _cache, _HOSTS),
    Rule(("NPROC",), _threads, "jaxshard/optimizer/owners/owners.py", ("cpu",)),
    Rule(COORDINATES[:1], _together, _HOSTS),
    Rule(COORDINATES[1:2], _first_of(COORDINATES[:1]), _HOSTS),
    Rule(COORDINATES[2:], _first_of(COORDINATES[:2]), _HOSTS),
    Rule(("grpc_proxy", "https_proxy", "http_proxy"), _proxy, _HOSTS),
    Rule(FRACTIONS[:1], _fraction, _MEMORY, _GPU),
    Rule(FRACTIONS[1:], _old_fraction, _MEMORY, _GPU),
    Rule(("XLA_PYTHON_CLIENT_PREALLOCATE",), _preallocate, _MEMORY, _GPU),
    Rule(("XLA_PYTHON_CLIENT_ALLOCATOR",), _allocator, _MEMORY, _GPU),
    Rule(("CUDA_VISIBLE_DEVICES",), _visible, _CUDA),
    Rule(("CUDA_LAUNCH_BLOCKING",), _disabled("the host waits for each kernel: unset it"), _CUDA, _GPU),
    Rule(("LD_LIBRARY_PATH",), _libraries, "docs.jax.dev, installation", _GPU),
    Rule(("NCCL_P2P_DISABLE",), _disabled("GPUs do not use NVLink: unset it"), _NCCL, _GPU),
    Rule(("NCCL_SHM_DISABLE",), _disabled("GPUs of a host may use its network: unset it"), _NCCL, _GPU),
    Rule(("NCCL_IB_DISABLE",), _disabled("hosts do not use InfiniBand or RoCE, only IP: unset it"), _NCCL, _GPU),
    Rule(("NCCL_P2P_LEVEL",), _distance, _NCCL, _GPU),
    Rule(("NCCL_SOCKET_IFNAME",), _interfaces, _NCCL, _GPU),
    Rule(("NCCL_DEBUG",), _prints, _NCCL, _GPU),
    Rule(
        ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        *(_set(_BY_HAND), _NCCL, _GPU),
    ),
    Rule(("LIBTPU_INIT_ARGS",), _async_fusion, _OPTIONS, ("tpu",)),
)
"""Rules for variables, in the order of the output."""


def _below(least: int, advice: str) -> Judge:
    return lambda value, here, environment: (True, advice) if value.isdigit() and int(value) < least else None


FLAGS: tuple[Rule, ...] = (
    Rule(("xla_force_host_platform_device_count",), _set("the number of simulated CPU devices"), _XLA, ("cpu",)),
    Rule(("xla_dump_to",), _set("XLA dumps every compiled program there: remove it", wrong=True), _XLA),
    Rule(
        ("xla_disable_hlo_passes", "xla_disable_all_hlo_passes"),
        *(_set("XLA skips passes: remove it", wrong=True), _XLA),
    ),
    Rule(("xla_backend_optimization_level",), _below(2, "programs are slow: remove it"), _XLA),
    Rule(("xla_gpu_autotune_level",), _below(1, "kernels are not autotuned, and are slow: remove it"), _XLA, _GPU),
    Rule(
        ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"),
        *(_yes("runs are bitwise reproducible, but some kernels are slower", wrong=False), _XLA, _GPU),
    ),
    Rule(
        ("xla_gpu_enable_latency_hiding_scheduler",),
        *(
            _yes("collectives overlap with products where possible", wrong=False),
            "docs.jax.dev, GPU performance tips",
            _GPU,
        ),
    ),
)
"""Rules for flags in XLA_FLAGS."""
