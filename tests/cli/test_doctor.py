"""`jaxshard doctor`: what it finds on this machine, faults that are planted, a rule for each setting, wrong words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from clock import at_most
from jax import lax

from jaxshard.checkpoint.folder_lock import Lock
from jaxshard.cli import main
from jaxshard.cli.doctor import apart, folder, links, machine, setting_rules
from jaxshard.cli.doctor import command as doctor
from jaxshard.cli.doctor import devices as doctor_devices
from jaxshard.cli.doctor import probe as doctor_probe
from jaxshard.cli.doctor import sections as doctor_sections
from jaxshard.cli.doctor.apart import Told
from jaxshard.cli.doctor.devices import Machine
from jaxshard.cli.doctor.findings import Here
from jaxshard.system import files

ROOT = Path(__file__).parents[2]
GPUS, TPUS, SIMULATED = Here("gpu", 8, 64, ["gpu"], ["eth0", "lo"]), Here("tpu", 4), Here("cpu", 8, 2)
NO_PREFIX = ("JAX_", "XLA_", "NCCL_", "CUDA_", "LIBTPU_", "TPU_", "NPROC")


@pytest.fixture
def clean(monkeypatch):
    """No setting of these tests' own."""
    for name in [name for name in os.environ if name.startswith(NO_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def here(monkeypatch, clean):
    """What is done in processes of their own is done in this one; the machine has no accelerator."""

    def ask(task, arguments, seconds, changed=None):
        lines = [json.loads(json.dumps(line)) for line in doctor_probe.told_of(doctor_probe.WORK[task], arguments)]
        return Told(lines, 0, "")

    monkeypatch.setattr(doctor, "ask", ask)
    monkeypatch.setattr(doctor_probe, "_LARGE", {"cpu": 2**18})
    monkeypatch.setattr(doctor, "_machine", lambda: Machine(memory_bytes=16 * 10**9, cores=64))


def run(capsys, *arguments):
    """(exit status, standard output, standard error)"""
    status = main(["doctor", *map(str, arguments)])
    return status, *capsys.readouterr()


def wrong(section):
    return [f"{found.what}: {found.advice}" for found in section.findings if found.wrong]


# A machine on which nothing is wrong.


def test_nothing_is_wrong(here, tmp_path, capsys):
    status, out, error = run(capsys, "--out", tmp_path, "--json", tmp_path / "found.json")
    assert (status, error) == (0, "")
    assert out.endswith("\nNo problems found.\n")
    assert max(map(len, out.splitlines())) <= max(80, len(str(tmp_path)) + 7)
    assert "8 simulated CPU devices, on 64 cores and 16 GB of memory" in out
    assert out.count(" right ") == 6
    assert "these are not real links" in out
    assert "make a folder, write, rename, read back, lock: done; " in out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_wrong"] == 0
    assert found["versions"]["jax"] == jax.__version__
    assert [section["title"] for section in found["sections"]][:2] == ["Packages", "Devices"]
    exchanges = [line["exchange"] for line in found["devices"]["lines"] if "exchange" in line]
    assert [(each["kind"], each["bytes"]) for each in exchanges] == [
        (kind, size) for size in (2**16, 2**18) for kind in links.KINDS
    ]
    assert min(each["seconds"] for each in exchanges) > 0


def test_a_process_of_its_own_finds_the_same(clean, monkeypatch, tmp_path, capsys):
    """Once as users run it: with its processes, on another number of devices."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out, _ = run(capsys, "--out", tmp_path / "not" / "there")
    assert status == 0, out
    assert "3 simulated CPU devices" in out
    assert out.count(" right ") == 6
    assert f"it does not exist yet; tested in {tmp_path}" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []


def test_one_device_has_nobody_to_send_to(here, monkeypatch, capsys):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *platform: first)
    status, out, _ = run(capsys)
    assert status == 0
    assert "1 CPU device, on 64 cores" in out
    assert "not tested: they need two devices" in out


# Planted faults: devices and links.


@pytest.mark.parametrize("kind", links.KINDS)
def test_a_wrong_result_is_told(here, monkeypatch, capsys, kind):
    right = links._RUNS_OF[kind]
    planted = {**links._RUNS_OF, kind: lambda row: right(row) + (lax.axis_index("all") == 5)}
    monkeypatch.setattr(links, "_RUNS_OF", planted)
    status, out, _ = run(capsys)
    assert status == 1
    assert out.count("WRONG") == 2
    assert f"! {kind} of 65.5 kB: device 5 has " in out
    assert "2 problems found, marked by !" in out


def test_a_sum_that_lacks_a_device_is_told(here, monkeypatch, capsys):
    without_one = {**links._RUNS_OF, "all-reduce": lambda row: lax.psum(row * (lax.axis_index("all") != 2), "all")}
    monkeypatch.setattr(links, "_RUNS_OF", without_one)
    assert run(capsys)[0] == 1


def test_jax_that_fails_is_told_in_a_line(here, monkeypatch, capsys):
    def fail(*platform):
        raise RuntimeError("Unable to initialize backend 'tpu': it is asleep\nand more")

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(jax, "devices", fail)
    status, out, error = run(capsys)
    assert (status, error) == (1, "")
    text = " ".join(out.split())
    assert (
        "! devices: RuntimeError: Unable to initialize backend 'tpu': it is asleep: unset JAX_PLATFORMS=tpu or "
        'pip install "jaxshard[tpu]"'
    ) in text
    assert "and more" not in text


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (Told([{"stage": "devices"}], None, ""), "devices: no answer within 60 s: another process may use the"),
        (Told([{"stage": "devices"}, {"stage": "links"}], None, ""), "links: no answer within 60 s"),
        (Told([], None, ""), "the start of Python and JAX: no answer within 60 s: the machine is busy"),
        (
            Told([{"stage": "devices"}], -6, "F1 x.cc:2] Unknown flag"),
            "ended with signal 6, and the last message 'Unkno",
        ),
        (Told([{"stage": "devices"}, {"error": "there is no such platform"}], 0, ""), "devices: there is no such"),
    ],
)
def test_no_devices(told, says):
    section = doctor_devices.devices(told, Machine(), {}, 60.0)
    assert section.lines == ["JAX found none"]
    (found,) = wrong(section)
    assert says in found


def told_of(platform="gpu", count=8, kind="NVIDIA H100 80GB HBM3", **more):
    device = {"platform": platform, "kind": kind, "process": 0, "memory_bytes": 60 * 10**9}
    listed = [device | {"id": number} for number in range(count)]
    found = {"devices": listed, "num_processes": 1, "seconds": 0.5}
    return Told([{"stage": "devices"}, found, *({name: value} for name, value in more.items())], 0, "")


@pytest.mark.parametrize(
    ("told", "seen", "environment", "says"),
    [
        (told_of("cpu", kind="cpu"), Machine(["gpu"]), {}, 'JAX does not use it (): pip install "jaxshard[cuda]"'),
        (
            told_of("cpu", kind="cpu"),
            Machine(["tpu"]),
            {},
            "the TPU of this machine: JAX does not use it (): pip install",
        ),
        (told_of("cpu", kind="cpu"), Machine(["gpu"]), {"JAX_PLATFORMS": "cpu"}, None),  # the rule of it tells
        (told_of(), Machine(["gpu"]), {}, None),
        (told_of("cpu", kind="cpu"), Machine(gpu_without_driver=True), {}, "install its driver, or start the contain"),
        (told_of(), Machine(["gpu"], shared_bytes=64 * 2**20), {}, "/dev/shm of 67.1 MB: NCCL wants 1 GB"),
        (told_of(), Machine(["gpu"], shared_bytes=2**30), {}, None),
        (told_of(count=1), Machine(["gpu"], shared_bytes=64 * 2**20), {}, None),
        (told_of("cpu", kind="cpu"), Machine(shared_bytes=64 * 2**20), {}, None),
    ],
)
def test_what_the_machine_has_and_jax_does_not_use(told, seen, environment, says):
    found = wrong(doctor_devices.devices(told, seen, environment, 60.0))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_the_reason_why_jax_does_not_use_a_gpu_is_told():
    told = told_of("cpu", kind="cpu")
    told.lines.append({"platform": "cuda", "why": "no CUDA-capable device is detected"})
    (found,) = wrong(doctor_devices.devices(told, Machine(["gpu"]), {}, 60.0))
    assert "(no CUDA-capable device is detected)" in found


def test_devices_of_a_kind_take_one_line():
    section = doctor_devices.devices(told_of(), Machine(["gpu"]), {}, 60.0)
    assert section.lines == ["8 x NVIDIA H100 80GB HBM3 (gpu), 60 GB of memory for JAX on each", "found in 500 ms"]


def exchange(rate, kind="all-reduce"):
    return {"kind": kind, "bytes": 2**26, "seconds": 0.01, "bytes_per_second": rate, "wrong": ""}


@pytest.mark.parametrize(
    ("told", "slow"),
    [
        (told_of(exchange=exchange(40e9)), True),
        (told_of(exchange=exchange(50e9)), False),
        (told_of(kind="NVIDIA H100 PCIe", exchange=exchange(1e9)), False),  # it may have no NVLink
        (told_of("tpu", 4, "TPU v5 lite", exchange=exchange(19e9)), True),
        (told_of("tpu", 4, "TPU v5 lite", exchange=exchange(21e9)), False),
        (told_of("cpu", 8, "cpu", exchange=exchange(1e6)), False),
        (told_of(count=64, exchange=exchange(1e9)), False),  # of several nodes
    ],
)
def test_links_that_carry_less_than_a_tenth_are_told(told, slow):
    assert bool(wrong(doctor_devices.links(told))) == slow


# Processes of their own.


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module whose `main` is run in a process of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(body):
        (tmp_path / "planted_work.py").write_text(f"import os, sys, time\ndef main(arguments):\n    {body}\n")
        return "planted_work"

    return make


def test_work_that_hangs_is_killed_and_what_it_told_is_kept(work):
    module = work("print('{\"stage\": \"devices\"}', flush=True); print('noise {', flush=True); time.sleep(600)")
    with at_most(30):
        told = apart.told_by(module, [], os.environ, 2.0)
    assert told == Told([{"stage": "devices"}], None, "")


def test_work_that_crashes_is_told_with_its_last_words(work):
    module = work("sys.stderr.write('F1125 14:46:17.1 20 x.cc:2] Unknown flag\\n'); sys.stderr.flush(); os.abort()")
    told = apart.told_by(module, [], os.environ, 60.0)
    assert told.status == -6
    assert apart.last_words(told.errors) == "Unknown flag"


def test_work_sees_the_modules_that_its_parent_sees(work):
    assert apart.told_by(work("print('{\"given\": %d}' % len(arguments))"), ["a"], {}, 60.0).lines == [{"given": 2}]


def test_simulated_devices_are_eight_unless_the_user_chose(clean, monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "told_by", lambda module, words, variables, seconds: asked.append(variables))
    doctor.ask("devices", [], 1.0)
    assert (asked[-1]["JAX_NUM_CPU_DEVICES"], asked[-1]["NPROC"]) == ("8", "16")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    doctor.ask("devices", [], 1.0)
    assert "JAX_NUM_CPU_DEVICES" not in asked[-1]
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    doctor.ask("devices", [], 1.0)
    assert (asked[-1]["JAX_NUM_CPU_DEVICES"], "NPROC" in asked[-1]) == ("2", False)


def test_it_needs_no_extra(tmp_path):
    """Where rich, tyro, flax and orbax are missing, nothing but the lock is not tried."""
    missing = ("rich", "tyro", "cattrs", "flax", "tomli_w", "orbax", "filelock", "packaging", "matplotlib")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
import jaxshard.cli.doctor.command as doctor, jaxshard.cli.doctor.probe as probe
print([line for line in probe._folder(probe.Path({str(tmp_path)!r})) if "trial" not in line][1])
print(doctor.doctor_sections.packages({{"python": "3"}}, ["jax<0"]).findings)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "no_checkpoints" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_jax_that_cannot_be_imported_is_told_in_a_line():
    environment = os.environ | {"JAX_ENABLE_X64": "maybe", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxshard", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("jaxshard doctor: jax cannot be imported: ValueError: invalid truth value 'maybe'")


# Planted faults: the folder.


def test_a_folder_that_cannot_be_written(here, capsys):
    status, out, _ = run(capsys, "--out", "/proc/self")
    assert status == 1
    assert "! make a folder in /proc/self: No such file or directory: give the training user" in out.replace("\n ", "")


def tried(tmp_path, lock=Lock):
    return {each.what: each.wrong for each in folder.trials(tmp_path, lock)}


def test_a_folder_that_is_right(tmp_path):
    assert tried(tmp_path) == dict.fromkeys(["make a folder", "write", "rename", "read back", "lock"], "")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert tried(tmp_path) == {"make a folder": "", "write": "No space left on device"}
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_without_renames(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder.os, "rename", refuse)
    assert tried(tmp_path) == {"make a folder": "", "write": "", "rename": "Operation not supported"}


def test_a_disk_that_flips_a_bit(tmp_path, monkeypatch):
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path)[:-1] + b"?" if path.name == "arrays" else read(path)
    )
    monkeypatch.setattr(folder.os, "urandom", lambda size: b"x" * size)
    assert tried(tmp_path)["read back"] == "1 bytes differ"


class NoLock:
    """What a file system gives that knows no locks."""

    def __init__(self, place):
        (place / ".lock").touch()

    def release(self):
        pass


def test_a_file_system_without_locks(tmp_path):
    assert tried(tmp_path, NoLock)["lock"] == "two processes get the lock at once"

    def refuse(place):
        raise NotImplementedError("FileSystem does not appear to support flock")

    assert tried(tmp_path, refuse)["lock"] == "FileSystem does not appear to support flock"
    assert list(tmp_path.iterdir()) == []


def test_every_trial_has_its_advice(tmp_path):
    assert doctor_sections._OF_TRIALS.keys() == tried(tmp_path).keys()


def test_little_room_is_told():
    trial = {"what": "write", "seconds": 0.1, "wrong": ""}
    told = Told([{"stage": "folder"}, {"tried": "/x", "free_bytes": 10**8}, {"trial": trial}], 0, "")
    assert "100 MB free in /x" in wrong(doctor_sections.folder("/x", told, 60.0))[0]


# Packages.


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}, []),
        ({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2.post1"}, []),
        (
            {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.1"},
            ["jax-cuda13-plugin 0.10.1: JAX accepts a plugin only in"],
        ),
        (
            {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"},
            ["jax-cuda12-plugin and jax-cuda13-plugin: JAX uses only one of them"],
        ),
    ],
)
def test_plugins(installed, says):
    found = wrong(doctor_sections.packages(installed, []))
    assert len(found) == len(says)
    assert all(text.startswith(start) for text, start in zip(found, says, strict=True))


def test_packages_in_versions_that_jaxshard_does_not_take():
    needed = ["jax<0.5,>=0.4", "optax>=0.1", "nobody-has-this>=9", "numpy<1; extra == 'x'"]
    found = wrong(doctor_sections.packages({}, needed))
    assert [text.partition(":")[2] for text in found] == [
        ' jaxshard needs a different version: pip install "jax<0.5,>=0.4"',
        ' jaxshard needs a different version: pip install "numpy<1"',
    ]


# The machine.


def test_accelerators_are_known_by_their_files(tmp_path):
    assert machine.accelerators(tmp_path) == []
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    for name, text in {"vendor": "0x1ae0\n", "device": "0x0063\n", "class": "0x120000\n"}.items():
        (device / name).write_text(text)
    assert machine.accelerators(tmp_path) == ["tpu"]
    (device / "device").write_text("0x0042\n")  # a network card of Google's
    assert machine.accelerators(tmp_path) == []
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert machine.has_gpu_without_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert machine.accelerators(tmp_path) == ["gpu"]
    assert not machine.has_gpu_without_driver(tmp_path)


# Settings: for each rule an environment, and whether it is wrong (True) or told (False); None: nothing is said of it.

TOGETHER = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
RULES = [
    (SIMULATED, {"JAX_PLATFORMS": "cpu"}, False, "JAX uses only these backends"),
    (SIMULATED, {"JAX_PLATFORMS": ""}, None, ""),
    (SIMULATED, {"JAX_PLATFORMS": "gpu"}, True, "write cuda"),
    (Here("cpu", accelerators=["gpu"]), {"JAX_PLATFORMS": "cpu"}, True, "it hides this machine's GPU from JAX"),
    (GPUS, {"JAX_PLATFORMS": "cuda,cpu"}, False, "JAX uses only these backends"),
    (Here("cpu", accelerators=["tpu"]), {"JAX_PLATFORM_NAME": "cpu"}, True, "programs run on the CPU"),
    (SIMULATED, {"JAX_PLATFORM_NAME": "cpu"}, None, ""),
    (SIMULATED, {"JAX_ENABLE_X64": "True"}, True, "64 bits"),
    (SIMULATED, {"JAX_ENABLE_X64": "0"}, None, ""),
    (TPUS, {"JAX_DISABLE_JIT": "1"}, True, "very slow"),
    (GPUS, {"JAX_DEBUG_NANS": "1"}, True, "debugging option"),
    (GPUS, {"JAX_DEBUG_INFS": "yes"}, True, "debugging option"),
    (GPUS, {"JAX_CHECK_TRACER_LEAKS": "on"}, True, "debugging option"),
    (GPUS, {"JAX_ENABLE_CHECKS": "1"}, True, "debugging option"),
    (GPUS, {"JAX_ENABLE_CHECKS": "off"}, None, ""),
    (SIMULATED, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, True, "skips most optimizations"),
    (SIMULATED, {"JAX_COMPILATION_CACHE_DIR": "/x"}, True, "hang or abort"),
    (Here("cpu", 1), {"JAX_COMPILATION_CACHE_DIR": "/x"}, False, "cached there"),
    (TPUS, {"JAX_COMPILATION_CACHE_DIR": "/x"}, False, "cached there"),
    (SIMULATED, {"NPROC": "8"}, True, "NPROC=16"),
    (SIMULATED, {"NPROC": "16"}, None, ""),
    (GPUS, {"NPROC": "1"}, None, ""),
    (GPUS, TOGETHER, False, "it did not join the others"),
    (GPUS, {**TOGETHER, "JAX_PROCESS_ID": "x"}, True, "JAX_PROCESS_ID must be an integer"),
    (GPUS, {"JAX_COORDINATOR_ADDRESS": "host:1"}, True, "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set"),
    (GPUS, {"JAX_NUM_PROCESSES": "2"}, True, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be set"),
    (GPUS, {"JAX_PROCESS_ID": "0"}, True, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES must be set"),
    (GPUS, {**TOGETHER, "http_proxy": "http://p"}, True, "add host to no_proxy"),
    (GPUS, {**TOGETHER, "https_proxy": "http://p", "no_proxy": "a,host"}, False, "it did not join"),
    (GPUS, {**TOGETHER, "grpc_proxy": "http://p"}, True, "processes look for host through this proxy"),
    (GPUS, {"grpc_proxy": "http://p"}, None, ""),
    (GPUS, {"XLA_CLIENT_MEM_FRACTION": ".9"}, False, "reserves 90% of a GPU's memory"),
    (GPUS, {"XLA_CLIENT_MEM_FRACTION": ".3"}, True, "JAX uses only 30%"),
    (GPUS, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "1"}, True, "at most .95"),
    (GPUS, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, True, "not a number"),
    (GPUS, {"XLA_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, True, "the old name"),
    (SIMULATED, {"XLA_CLIENT_MEM_FRACTION": ".3"}, None, ""),
    (GPUS, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, True, "becomes fragmented"),
    (GPUS, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, None, ""),
    (GPUS, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, True, "very slow"),
    (GPUS, {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, None, ""),
    (GPUS, {"CUDA_VISIBLE_DEVICES": "0,1"}, False, "JAX sees only these GPUs"),
    (Here("cpu", accelerators=["gpu"]), {"CUDA_VISIBLE_DEVICES": ""}, True, "hides all GPUs"),
    (SIMULATED, {"CUDA_VISIBLE_DEVICES": ""}, None, ""),
    (GPUS, {"CUDA_LAUNCH_BLOCKING": "1"}, True, "waits for each kernel"),
    (GPUS, {"CUDA_LAUNCH_BLOCKING": "0"}, None, ""),
    (GPUS, {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}, False, "take precedence over those that pip installed"),
    (GPUS, {"LD_LIBRARY_PATH": "/opt/lib"}, None, ""),
    (GPUS, {"NCCL_P2P_DISABLE": "1"}, True, "do not use NVLink"),
    (GPUS, {"NCCL_P2P_DISABLE": "0"}, None, ""),
    (TPUS, {"NCCL_P2P_DISABLE": "1"}, None, ""),
    (GPUS, {"NCCL_SHM_DISABLE": "1"}, True, "may use its network"),
    (GPUS, {"NCCL_IB_DISABLE": "1"}, True, "InfiniBand"),
    (GPUS, {"NCCL_P2P_LEVEL": "LOC"}, True, "never send to each other directly"),
    (GPUS, {"NCCL_P2P_LEVEL": "NVL"}, False, "NCCL's own choice"),
    (GPUS, {"NCCL_SOCKET_IFNAME": "eth,ib"}, False, "uses only these network interfaces"),
    (GPUS, {"NCCL_SOCKET_IFNAME": "ib"}, True, "this network interface does not exist: use one of eth0, lo"),
    (GPUS, {"NCCL_SOCKET_IFNAME": "=eth"}, True, "this network interface does not exist"),
    (GPUS, {"NCCL_SOCKET_IFNAME": "=eth0"}, False, "uses only these"),
    (GPUS, {"NCCL_SOCKET_IFNAME": "^docker"}, False, "does not use these network interfaces"),
    (GPUS, {"NCCL_DEBUG": "INFO"}, False, "prints many lines"),
    (GPUS, {"NCCL_DEBUG": "WARN"}, None, ""),
    *((GPUS, {f"NCCL_{name}": "1"}, False, "NCCL's own choice") for name in ("ALGO", "PROTO", "BUFFSIZE")),
    *(
        (GPUS, {f"NCCL_{name}": "1"}, False, "NCCL's own choice")
        for name in ("NTHREADS", "MIN_NCHANNELS", "MAX_NCHANNELS")
    ),
    (TPUS, {"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"}, False, "compiler uses these flags"),
    (
        TPUS,
        {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_async_collective_fusion=true"},
        False,
        "xla_tpu_enable_async_collective_fusion reduces the overlap",
    ),
    (GPUS, {"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"}, None, ""),
    (
        SIMULATED,
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        False,
        "the number of simulated CPU devices",
    ),
    (GPUS, {"XLA_FLAGS": "--xla_dump_to=/x"}, True, "dumps every compiled program"),
    (GPUS, {"XLA_FLAGS": "--xla_disable_hlo_passes=fusion"}, True, "skips passes"),
    (GPUS, {"XLA_FLAGS": "--xla_disable_all_hlo_passes"}, True, "skips passes"),
    (SIMULATED, {"XLA_FLAGS": "--xla_backend_optimization_level=0"}, True, "programs are slow"),
    (SIMULATED, {"XLA_FLAGS": "--xla_backend_optimization_level=3"}, None, ""),
    (GPUS, {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}, True, "not autotuned"),
    (GPUS, {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}, False, "are bitwise reproducible"),
    (GPUS, {"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops"}, False, "are bitwise reproducible"),
    (GPUS, {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"}, False, "with products"),
    (GPUS, {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}, None, ""),
]
UNSET = {"JAX_COMPILATION_CACHE_DIR", "XLA_CLIENT_MEM_FRACTION", "NPROC"}  # told of where they are not set


@pytest.mark.parametrize(("here_is", "environment", "is_wrong", "says"), RULES)
def test_a_setting(here_is, environment, is_wrong, says):
    found = [each for each in doctor_sections.judged(environment, here_is) if "=" in each.what]
    if is_wrong is None:
        assert found == []
        return
    assert [each.wrong for each in found].count(True) == is_wrong, found
    (told,) = [each for each in found if each.wrong == is_wrong and says in each.advice][:1]
    assert told.source
    assert "\n" not in told.advice
    assert len(told.advice) < 120


def test_each_rule_is_tried():
    tried = {name for _, environment, told, _ in RULES if told is not None for name in environment}
    flags = {
        name
        for _, environment, told, _ in RULES
        if told is not None
        for name in doctor_sections.flags_in(environment.get("XLA_FLAGS", ""))
    }
    assert {name for rule in setting_rules.VARIABLES for name in rule.names} <= tried
    assert {name for rule in setting_rules.FLAGS for name in rule.names} == flags


def test_what_is_not_set_and_matters_is_told():
    def told(here_is, **environment):
        return {each.what for each in doctor_sections.judged(environment, here_is) if "=" not in each.what}

    assert told(GPUS) == UNSET - {"NPROC"}
    assert told(GPUS, JAX_COMPILATION_CACHE_DIR="/x", XLA_PYTHON_CLIENT_MEM_FRACTION=".9") == set()
    assert told(TPUS) == {"JAX_COMPILATION_CACHE_DIR"}
    assert told(SIMULATED) == {"NPROC"}
    assert told(Here("cpu", 8, cores=16)) == told(Here("cpu", 1, cores=1)) == told(Here("")) == set()


def test_a_flag_that_jaxshard_sets_itself_is_told():
    here_is = doctor._here([{"platform": "gpu"}] * 8, Machine(["gpu"]))
    flag = "xla_gpu_enable_while_loop_double_buffering"
    assert flag in here_is.own_flags
    (found,) = [each for each in doctor_sections.judged({"XLA_FLAGS": f"--{flag}=false"}, here_is) if each.wrong]
    assert "pass yours in train_step(compiler_options=...)" in found.advice


def test_other_settings_are_named(here, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_NEW", "1")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    status, out, _ = run(capsys)
    assert status == 1
    assert "also set: NCCL_NEW" in out
    assert "! JAX_ENABLE_X64=1: arrays have 64 bits" in out
    assert "1 problem found, marked by !" in out


# Wrong words, and where it is shown.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sconds", "3"], "unknown argument '--sconds'; did you mean '--seconds'?"),
        (["more"], "unknown argument 'more'"),
        (["--seconds", "0"], "--seconds 0 must be above 0"),
        (["--seconds", "nan"], "--seconds nan must be above 0"),
        (["--seconds", "inf"], "--seconds inf must be above 0"),
        (["--seconds", "x"], "invalid float value: 'x'"),
        (["--seconds"], "expected one argument"),
        (["--out", ""], "it is not a folder: give one"),
        (["--out", __file__], "it is not a folder: give one"),
        (["--json", "/"], "--json /: Is a directory"),
        (["--json", "nowhere/x.json"], "give a file in an existing"),
    ],
)
def test_what_is_wrong_is_one_line(words, says, capsys):
    status, out, error = run(capsys, *words)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert says in error


def test_values_cannot_move_the_cursor(here, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/x\x1b[2J\n" + "y" * 200)
    out = run(capsys)[1]
    assert "\x1b" not in out
    assert "/x\\x1b[2J\\n" in out
    assert "y" * 80 not in out
