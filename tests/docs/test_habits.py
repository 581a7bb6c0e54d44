"""Packaging and workflows: one version, what `make train` installs, pinned actions, and steps that run here too."""

import re
import tomllib

import pytest
import yaml
from pages import ROOT

import jaxshard

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
PINNED = re.compile(r"- uses: [\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "jaxshard/__init__.py"
    assert f'__version__ = "{jaxshard.__version__}"' in (ROOT / "jaxshard" / "__init__.py").read_text()
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()
    assert f"## [{jaxshard.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def packages_of(extra):
    """The packages that an extra installs, with those of the extras that it names."""
    found = set()
    for requirement in PROJECT["project"]["optional-dependencies"][extra]:
        name, inner = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?.*", requirement).groups()
        found |= set().union(*map(packages_of, inner.split(","))) if name == "jaxshard" else {name}
    return found


def test_the_library_stands_on_jax_optax_and_numpy():
    """All else is an extra: `pip install jaxshard` brings 9 packages."""
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"jax", "optax", "numpy"}


def test_training_installs_no_linters_and_no_test_tools():
    others = {"libtpu", "ruff", "pyright", "codespell", "pytest", "pytest-xdist", "sybil", "hypothesis", "ipykernel"}
    assert not packages_of("train") & others
    assert packages_of("dev") >= {*packages_of("train"), "ruff", "pyright", "codespell", "pytest", "sybil"}


def test_libtpu_is_in_no_environment_that_programs_run_in():
    """JAX starts any libtpu that it can import; so the tests' lies beside, and only pytest is told where."""
    assert "libtpu" not in packages_of("dev")
    installs = [line for line in MAKEFILE.splitlines() if "libtpu" in line and "install" in line]
    assert installs
    assert all("--target" in line for line in installs)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path):
    used = [line.strip() for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    assert all(PINNED.fullmatch(line) for line in used), used


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_scripts_and_targets_of_this_repository(path):
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
    commands = [
        step["run"]
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert commands
    for program, what, *_ in map(str.split, commands):
        assert (program == "make" and what in targets) or (ROOT / program).is_file() or program == "test", program


def test_workflows_may_do_no_more_than_they_need():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for name, job in workflow["jobs"].items():
            assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {}), name
            assert "timeout-minutes" in job, name


@pytest.mark.parametrize("name", ["QUICK", "NEWEST"])
def test_the_makefile_names_tests_that_exist(name):
    (found,) = re.findall(rf"^{name} := ((?:.*\\\n)*.*)$", MAKEFILE, re.M)
    paths = found.replace("\\", " ").split()
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == []
