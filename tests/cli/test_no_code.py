"""No file runs code: not a run's, not a checkpoint's, not a Hugging Face folder's, and not what lies in the folder that
a command is started in. What the caller types runs."""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_once import fast_environment

from jaxshard.apps.config import seal, toml
from jaxshard.cli import main

SMALL = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
SMALL += ["--train.rows", "8", "--model.sequence-length", "16", "--train.steps", "2", "--optimizer.warmup-steps", "1"]
SMALL += ["--train.log-to"]
TOY = ["--toy", "--machines", "cpu:2", "--steps", "ddp", "--against", "ddp", "--processes", "2", "--rounds", "1"]
EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\nimport numpy\ndef rows(): return numpy.zeros((90, 17), int)\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(["train", *SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def mark(tmp_path):
    """Is made where code runs."""
    return tmp_path / "code ran"


@pytest.fixture
def evil(tmp_path, mark, monkeypatch):
    """Where the code is, in each form that names it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "evil.py").write_text(EVIL.format(mark=str(mark)))
    return {"a file": f"{here / 'evil.py'}:rows", "a module": "evil:rows"}


FORMS = {  # what a configuration says
    "data": lambda name: f'[data]\npath = "{name}"\nformat = "uint32"\n',
    "held-out data": lambda name: f'[data]\npath = "stdlib"\nheldout_path = "{name}"\n',
    "both": lambda name: f'[data]\npath = "{name}"\nheldout_path = "{name}"\n',
    "an optimizer": lambda name: f'[optimizer]\nname = "{name}"\n',
    "its arguments": lambda name: f"[optimizer]\narguments = \"mask = '{name}'\"\n",
    "a start": lambda name: f'[train]\nstart = "{name}"\n',
    "a logger": lambda name: f'[train]\nlog_to = ["{name}"]\n',
    "a place": lambda name: f'[sharding]\nstate_memory = "{name}"\n',
    "a strategy": lambda name: f'[sharding]\nstrategy = "{name}"\n',
}


def planted(run, tmp_path, text):
    """A copy of the run whose configuration says `text`, too, sealed as jaxshard does it."""
    copy = tmp_path / "planted"
    shutil.copytree(run, copy)
    table = (copy / "config.toml").read_text()
    section = text.partition("\n")[0]
    options = {line.partition(" ")[0]: line for line in text.splitlines()[1:]}
    lines, where = [], ""
    for line in table.splitlines():
        where = line if line.startswith("[") else where
        if line.startswith("#") or (where == section and line.partition(" ")[0] in options):
            continue
        lines.append(line)
        if line == section:
            lines += options.values()
    (copy / "config.toml").write_text(seal.sealed("\n".join(lines) + "\n"))
    return copy


@pytest.mark.parametrize(("form", "kind"), [*((form, "a file") for form in FORMS), ("data", "a module")])
def test_no_command_runs_what_a_run_names(run, evil, mark, tmp_path, capfd, form, kind):
    copy = planted(run, tmp_path, FORMS[form](evil[kind]))
    new = str(tmp_path / "new")
    commands = [["eval", str(copy)], ["train", "--resume", "--out", str(copy), "--train.steps", "3"]]
    further = [
        ["generate", str(copy), "--tokens", "2"],
        ["train", "--resume-if-saved", "--out", str(copy), "--train.steps", "3"],
        ["train", *SMALL, "--train.start", str(copy), "--out", new],
        ["train", str(copy / "config.toml"), "--out", f"{new}2"],
        ["plan", str(copy / "config.toml")],
        ["explain", str(copy / "config.toml"), "--no-compile"],
        ["ckpt", "export", str(copy), "--huggingface", f"{new}3"],
        ["ckpt", "verify", str(copy)],
    ]
    for words in [*commands, *(further if form == "data" else [])]:
        with contextlib.suppress(SystemExit):
            main(words)
        error = capfd.readouterr().err
        assert "Traceback" not in error, (words, error)
        assert not mark.exists(), words


@pytest.mark.parametrize("kind", ["a file", "a module"])
def test_what_the_caller_types_runs(run, evil, mark, tmp_path, capfd, kind):
    name = evil[kind]
    copy = planted(run, tmp_path, FORMS["data"](name))
    assert main(["eval", str(copy)]) == 2
    error = capfd.readouterr().err
    assert f"the configuration names the function {name}, but files may not run code" in error
    assert f"type --data {name}" in error
    assert main(["eval", str(copy), "--data", name]) == 0
    assert mark.exists()
    assert "on 153 tokens" in capfd.readouterr().out  # what the run holds back, 9 of 90 rows
    mark.unlink()
    assert main(["train", "--resume", "--out", str(copy), "--train.steps", "3"]) == 2
    assert not mark.exists()
    assert main(["train", "--resume", "--out", str(copy), "--train.steps", "3", f"--data={name}"]) == 0
    assert mark.exists() or kind == "a module"  # which Python imports once


def test_one_function_does_not_stand_for_another(run, evil, mark, tmp_path, capfd):
    (tmp_path / "good.py").write_text("import numpy\ndef rows(): return numpy.zeros((90, 17), int)\n")
    copy = planted(run, tmp_path, FORMS["both"](evil["a file"]))
    good = f"{tmp_path / 'good.py'}:rows"
    assert main(["train", "--resume", "--out", str(copy), "--train.steps", "3", "--data", good]) == 2
    assert f"data.heldout-path: the configuration names the function {evil['a file']}" in capfd.readouterr().err
    assert not mark.exists()


def imported_names():
    """Modules that a command may import, and that are not Python's own."""
    code = (
        "import sys, jaxshard.apps.commands.train, jaxshard.cli.doctor.command\n"
        "import jaxshard.apps.commands.bench, jaxshard.cli.ckpt.command\n"
        "import matplotlib.figure, tokenizers, grain\nprint(*sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    names = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"__main__"}
    return sorted(
        {*names, "wandb", "trackio", "torch", "sitecustomize", "usercustomize", "libtpu", "tomllib", "random"}
    )


def started(*words, where, **more):
    """The command, as its console script runs it: the current folder is not where modules are looked for."""
    code = "import sys; sys.argv[0] = 'jaxshard'; from jaxshard.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=fast_environment(**more),
    )


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("doctor", "bench"))]
)
def test_modules_in_the_current_folder_are_not_imported(tmp_path, mark, command):
    """The processes that a command starts look no more into the current folder than the command does."""
    here = tmp_path / "here"
    here.mkdir()
    names = imported_names()
    assert {"jax", "optax", "jaxshard", "numpy", "rich", "tyro"} <= set(names)
    for name in names:
        (here / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    with_processes = ["--processes", "2", "--sharding.devices", "2", "--out", str(tmp_path / "run")]
    words = {
        "train": ["train", *SMALL, *with_processes],
        "doctor": ["doctor", "--out", str(tmp_path)],
        "bench": ["bench", *TOY],
    }[command]
    found = started(*words, where=here)
    assert found.returncode in ((0, 1) if command == "doctor" else (0,)), found.stderr
    assert "Traceback" not in found.stderr
    assert not mark.exists()


AS_NAME = {"exec", "eval", "compile", "__import__"}
AS_ATTRIBUTE = {
    "import_module",
    "spec_from_file_location",
    "exec_module",
    "run_path",
    "run_module",
    "from_string",
    "CDLL",
}
AS_ATTRIBUTE |= {"Popen", "popen", "execv", "execve", "posix_spawn"}


def may_run_code(call):
    """Whether a call imports, compiles or starts what text names."""
    attribute, name = getattr(call.func, "attr", ""), getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    chosen = name == "getattr" and getattr(call.args[0], "id", "") in ("jaxshard", "optax")
    if call.args and isinstance(call.args[0], ast.Constant):
        return False  # it is fixed
    return (
        name in AS_NAME
        or attribute in AS_ATTRIBUTE
        or chosen
        or (owner, attribute) in (("subprocess", "run"), ("os", "system"))
    )


def test_each_place_where_text_may_become_code_is_listed():
    """SECURITY.md lists them; a new one has to be thought about."""
    package = Path(toml.__file__).parents[2]
    files = {
        file.relative_to(package.parent).as_posix()
        for file in package.rglob("*.py")
        if any(isinstance(node, ast.Call) and may_run_code(node) for node in ast.walk(ast.parse(file.read_text())))
    }
    page = (package.parent / "SECURITY.md").read_text().splitlines()
    assert sorted(files) == sorted(line.split("`")[1] for line in page if line.startswith("| `"))


def test_figures_start_no_latex(tmp_path, mark, monkeypatch):
    """matplotlib reads settings from the current folder."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.dpi: 100000\nsavefig.dpi: 100000\n")
    (tmp_path / "bin").mkdir()
    for name in ("latex", "dvipng", "kpsewhich"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ntouch '{mark}'\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    found = started("plan", "--strategies", "zero2", "--out", "figures", where=tmp_path, PATH=path)
    assert (found.returncode, found.stderr) == (0, "")
    assert (tmp_path / "figures" / "plan.png").is_file()
    assert not mark.exists()


def test_settings_of_figures_that_never_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "matplotlibrc")
    found = started("plan", "--strategies", "zero2", "--out", "figures", where=tmp_path)
    assert found.returncode == 2
    assert "matplotlibrc" in found.stderr
    assert "it is a pipe, not a file" in found.stderr
    assert found.stderr.count("\n") == 1
