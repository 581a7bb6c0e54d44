"""Each recipe in launch/ is read by its program's own schema or parser, starts our trainer, and knows its exit codes.

tests/schemas/ holds what scripts/launch_schemas.py took from programs that are too heavy to be installed here.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import jax
import jsonschema
import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml

import jaxshard
from jaxshard.apps.commands.train import parse
from jaxshard.processes import start

ROOT = Path(__file__).parents[2]
SCHEMAS = {name: json.loads((ROOT / f"tests/schemas/{name}.json").read_text()) for name in ("skypilot", "slurm", "xpk")}
MODELS = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
}


def recipe(name):
    return (ROOT / "launch" / name).read_text()


# Each check returns the command that its program would start on every node or process, and on how many devices.


def jobset(text, _):
    (document,) = kubernetes(text)
    (replicated,) = document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return container["command"], job["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]


def trainjob(text, _):
    trainer = kubernetes(text)[-1]["spec"]["trainer"]
    return trainer["command"], trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def kubernetes(text):
    """The models ignore what they do not know, so all that was written must come back from them."""
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        lost = list(missing(document, MODELS[document["kind"]].from_dict(document).to_dict()))
        if lost:
            raise ValueError(f"{document['kind']}: unknown {lost}")
    return documents


def missing(given, known, path=""):
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            yield from missing(value, known.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for number, (value, other) in enumerate(zip(given, known, strict=True)):
            yield from missing(value, other, f"{path}/{number}")
    elif given != known:
        yield path


def skypilot(text, run):
    def any_case(_, options, given, __):
        if given.upper() not in options:
            yield jsonschema.ValidationError(f"{given} is none of {options}")

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"case_insensitive_enum": any_case})
    task = yaml.safe_load(text)
    kind(SCHEMAS["skypilot"]["task"]).validate(task)
    kind(SCHEMAS["skypilot"]["resources"]).validate(task["resources"])
    for storage in task["file_mounts"].values():
        kind(SCHEMAS["skypilot"]["storage"]).validate(storage)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 143]
    calls = run(task["run"], "jaxshard", SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8")
    return calls[0], task["num_nodes"] * int(task["resources"]["accelerators"].split(":")[1])


def slurm(text, run):
    pragmas = [shlex.split(line, comments=True) for line in re.findall(r"^#SBATCH (.*)$", text, re.M)]
    options, rest = slurm_options("sbatch", [word for words in pragmas for word in words])
    if rest:
        raise ValueError(f"sbatch: {rest} is no option")
    (step, *_) = run(text, "srun", SLURM_CPUS_PER_TASK="8")
    _, command = slurm_options("srun", step[1:])
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    return command, int(options["nodes"]) * int(options["gpus-per-node"])


def slurm_options(program, words):
    """As getopt_long: options with their values, and the words from the first that is none."""
    known, options = SCHEMAS["slurm"][program], {}
    for number, word in enumerate(words):
        option = re.fullmatch(r"--([\w-]+)(?:=(.*))?", word)
        if not option:
            return options, words[number:]
        kind = known.get(option[1])
        valued = option[2] is not None
        if kind is None or (valued and kind == "none") or (not valued and kind not in ("none", "optional")):
            raise ValueError(f"{program}: {word} is not as in its manual: {kind}")
        if isinstance(kind, list) and option[2] not in kind:
            raise ValueError(f"{program}: {word} is not one of {kind}")
        options[option[1]] = option[2]
    return options, []


def xpk(text, run):
    (call, *_) = run(text, "xpk")
    assert call[:3] == ["xpk", "workload", "create"]
    given = xpk_parser().parse_args(call[3:])
    assert given.restart_on_exit_codes == "75"  # it restarts after 127 to 255 in any case
    inside = shlex.split(given.command)
    return inside[inside.index("jaxshard") :], int(given.tpu_type.split("-")[1]) * given.num_slices


def xpk_parser():
    def name_type(text):
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text) or len(text) > 40:
            raise argparse.ArgumentTypeError(f"{text} is no name")
        return text

    types = {"int": int, "name_type": name_type}
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    groups = {group["flags"][0]: group for group in SCHEMAS["xpk"]["exclusive"]}
    group = parser
    for option in SCHEMAS["xpk"]["options"]:
        if option["flags"][0] in groups:
            group = parser.add_mutually_exclusive_group(required=groups[option["flags"][0]]["required"])
        elif not any(option["flags"][0] in each["flags"] for each in groups.values()):
            group = parser
        if option["takes_value"]:
            kind = {"type": types.get(option["type"], str), "choices": option["choices"]}
            action = "append" if option["repeats"] else "store"
            group.add_argument(*option["flags"], action=action, required=option["required"], **kind)
        else:
            group.add_argument(*option["flags"], action="store_true")
    return parser


CHECKS = {
    "jobset.yaml": jobset,
    "skypilot.yaml": skypilot,
    "slurm.sbatch": slurm,
    "trainjob.yaml": trainjob,
    "xpk.sh": xpk,
}


@pytest.fixture
def run(tmp_path):
    """Runs a script in which the named programs only note how they are called, and return `status`."""

    def run(script, *programs, status=0, **environment):
        noted = tmp_path / "noted"
        noted.write_text("")
        for program in programs:
            stub = tmp_path / program
            stub.write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >>"$NOTED"; echo >>"$NOTED"\n')
            stub.write_text(stub.read_text() + 'env | grep "^JAX_" >>"$NOTED.environment"; exit "$STATUS"\n')
            stub.chmod(0o755)
        activate = tmp_path / ".venv/bin/activate"
        activate.parent.mkdir(parents=True, exist_ok=True)
        activate.write_text("")
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "NOTED": str(noted)}
        environment |= {"STATUS": str(status)}
        done = subprocess.run(
            ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        calls = [line.split("\0")[:-1] for line in noted.read_text().splitlines()]
        if done.stderr or not calls:
            raise ValueError(done.stderr or f"{programs} were not called")
        return calls

    return run


@pytest.mark.parametrize("name", CHECKS)
def test_recipe_is_read_by_its_program_and_starts_the_trainer(name, run, monkeypatch):
    command, num_devices = CHECKS[name](recipe(name), run)
    assert command[:2] == ["jaxshard", "train"]
    assert "--resume-if-saved" in command
    monkeypatch.chdir(ROOT)
    given = parse(command[2:])
    assert given.out is not None
    assert given.train.save_every > 0
    assert given.train.rows % (num_devices * given.sharding.microbatches) == 0


def test_every_recipe_has_a_check():
    assert sorted(CHECKS) == sorted(path.name for path in (ROOT / "launch").iterdir())


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("jobset.yaml", "maxRestarts: 50", "maxRestart: 50"),
        ("jobset.yaml", "parallelism: 2", "parallelism: two"),
        ("jobset.yaml", "restartPolicy: Never", "restartpolicy: Never"),
        ("jobset.yaml", "fieldPath:", "path:"),
        ("jobset.yaml", "replicas: 1", "replica: 1"),
        ("trainjob.yaml", "jax: {}", "jaxx: {}"),
        ("trainjob.yaml", "numNodes: 2", "nodes: 2"),
        ("trainjob.yaml", "runtimeRef:", "runtime:"),
        ("trainjob.yaml", "backoffLimit: 0", "backoffLimits: 0"),
        ("skypilot.yaml", "num_nodes: 2", "nodes: 2"),
        ("skypilot.yaml", "use_spot: true", "use_spot: maybe"),
        ("skypilot.yaml", "max_restarts_on_errors", "max_restarts"),
        ("skypilot.yaml", "mode: MOUNT", "mode: MOUNTED"),
        ("skypilot.yaml", "EAGER_NEXT_REGION", "[EAGER_NEXT_REGION]"),
        ("slurm.sbatch", "--requeue", "--reqeue"),
        ("slurm.sbatch", "--open-mode=append", "--open-mode=appended"),
        ("slurm.sbatch", "--time=24:00:00", "--time"),
        ("slurm.sbatch", "--exclusive ", "--exclusive 1 "),
        ("slurm.sbatch", "--kill-on-bad-exit", "--kill-on-exit"),
        ("slurm.sbatch", "esac", "end"),
        ("xpk.sh", "--num-slices=", "--slices="),
        ("xpk.sh", "--num-slices=1", "--num-slices=one"),
        ("xpk.sh", "v5litepod-32", "v5lite-32"),
        ("xpk.sh", "--workload=jaxshard", "--workload=Jaxshard"),
        ("xpk.sh", "--workload=jaxshard", ""),
    ],
)
def test_mistake_in_a_recipe_is_refused(name, right, wrong, run):
    text = recipe(name)
    assert right in text
    with pytest.raises((ValueError, KeyError, argparse.ArgumentError, jsonschema.ValidationError, SystemExit)):
        CHECKS[name](text.replace(right, wrong), run)


@pytest.mark.parametrize(
    ("status", "restarts", "queues"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 0), (130, 0, 0), (75, 0, 1), (143, 3, 1), (137, 0, 1), (134, 49, 1), (143, 50, 0)],
)
def test_slurm_queues_again_what_is_worth_it(status, restarts, queues, run):
    environment = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    calls = run(recipe("slurm.sbatch").replace(">&2", ""), "srun", "scontrol", status=status, **environment)
    assert [call for call in calls if call[0] == "scontrol"] == [["scontrol", "requeue", "7"]] * queues


@pytest.fixture
def joined(monkeypatch):
    """How `jaxshard.initialize` would join the processes under these variables."""

    def joined(environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        seen, called = [], []
        monkeypatch.setattr(start, "roll_call", lambda *arguments: called.append(arguments[:3]))
        monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: seen.append(arguments))
        jaxshard.initialize()
        assert called == seen
        (arguments,) = seen
        return arguments

    return joined


def test_jobset_joins_its_pods(joined):
    (document,) = kubernetes(recipe("jobset.yaml"))
    name, (replicated,) = document["metadata"]["name"], document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "1") for each in container["env"]}  # the field gives each pod its own
    host = f"{name}-{replicated['name']}-0-0.{name}"
    assert joined(variables) == (f"{host}:{container['ports'][0]['containerPort']}", job["completions"], 1)
    assert job["parallelism"] == job["completions"]
    ends_only_for_good(job, container)


def ends_only_for_good(job, container):
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1, 2]}
    assert job["backoffLimit"] == 0


def test_trainjob_is_what_trainer_looks_for():
    runtime, job = kubernetes(recipe("trainjob.yaml"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"  # Trainer fills in this container of this job
    ends_only_for_good(replicated["template"]["spec"], container)
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_skypilot_joins_its_nodes(run, joined, tmp_path):
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    run(yaml.safe_load(recipe("skypilot.yaml"))["run"], "jaxshard", **nodes)
    lines = (tmp_path / "noted.environment").read_text().splitlines()
    assert joined(dict(line.split("=", 1) for line in lines)) == ("10.0.0.7:1234", 2, 1)


def test_the_guide_names_every_recipe():
    guide = (ROOT / "docs/multihost.md").read_text()
    assert {f"launch/{name}" for name in CHECKS} == set(re.findall(r"launch/[\w.]+", guide))
