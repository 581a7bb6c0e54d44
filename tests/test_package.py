"""The package can be released: sdist and wheel have the presets, and the release script uploads only if told."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import jaxshard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGS = {path.name for path in (ROOT / "configs").iterdir()}
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.15"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(built) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_has_the_code_the_presets_and_nothing_else(wheel):
    assert {path.name for path in wheel.iterdir()} == {"jaxshard", f"jaxshard-{jaxshard.__version__}.dist-info"}
    assert {path.name for path in (wheel / "jaxshard" / "presets").iterdir()} == CONFIGS
    code = {path.relative_to(ROOT) for path in (ROOT / "jaxshard").rglob("*.py")}
    assert {path.relative_to(wheel) for path in wheel.rglob("*.py")} == code
    assert (wheel / "jaxshard" / "py.typed").exists()


def test_a_preset_of_the_wheel_is_found_by_its_name_in_an_empty_folder(wheel, tmp_path):
    program = "import sys; from jaxshard.cli import main; sys.exit(main(['explain', 'zero3', '--no-compile']))"
    environment = os.environ | {"PYTHONPATH": str(wheel), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_metadata_names_every_python(wheel):
    text = (wheel / f"jaxshard-{jaxshard.__version__}.dist-info" / "METADATA").read_text()
    metadata = email.message_from_string(text)
    assert metadata["Requires-Python"] == "<3.16,>=3.11"
    named = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", text, re.M)
    assert named == PYTHONS
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_sdist_builds_the_same_wheel(tmp_path):
    (built,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {f"configs/{name}" for name in CONFIGS} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/release.sh", "Makefile", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "dist/", "runs/"))]


FAKE_PYTHON = """\
#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m twine check"*) exit "${CHECK:-0}" ;;
esac
"""
FAKE_SMOKE = (
    '#!/bin/sh\necho "smoke $*" >> "$CALLS"\n[ -z "$2" ] || { mkdir -p dist; touch dist/x.whl; }\nexit "${SMOKE:-0}"\n'
)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Runs the release script in a repository whose Python and smoke test are fakes; returns (its end, their calls)."""
    root, calls = tmp_path / "root", tmp_path / "calls"
    for folder in ("scripts", "jaxshard"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "release.sh", root / "scripts")
    (root / "scripts" / "smoke_wheel.sh").write_text(FAKE_SMOKE)
    (root / "jaxshard" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text("## [1.2.3] - 2026-12-01\n")
    (root / ".gitignore").write_text("/dist/\n")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(root)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("CALLS", str(calls))

    def run(*words):
        calls.write_text("")
        done = subprocess.run(
            ["bash", "scripts/release.sh", *words, str(python)], capture_output=True, text=True, check=False
        )
        return done, calls.read_text()

    return run


def test_a_release_stops_before_the_upload(released):
    done, calls = released()
    assert done.returncode == 0, done.stderr
    assert "nothing was uploaded: run it again with --upload" in done.stdout
    assert re.search("smoke .* dist\n(.*\n)*-m twine check --strict .*x.whl\n$", calls)
    assert "twine upload" not in calls


def test_a_release_uploads_only_by_a_flag_what_passed_and_is_committed(released, monkeypatch):
    done, calls = released("--upload")
    assert done.returncode == 0, done.stderr
    assert re.search("twine check .*\n-m twine upload .*x.whl\n$", calls)
    for name, what in (("CHECK", "twine check"), ("SMOKE", "smoke")):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            done, calls = released("--upload")
        assert done.returncode == 1
        assert what in calls
        assert "twine upload" not in calls
    Path("CHANGELOG.md").write_text("## [1.2.2] - 2026-11-01\n")
    done, calls = released("--upload")
    assert (done.returncode, calls) == (1, "")
    assert "files are not committed" in done.stderr


def test_an_unknown_option_of_the_release_is_an_error(released):
    done, calls = released("--uplaod")
    assert (done.returncode, calls) == (2, "")
    assert "unknown option --uplaod" in done.stderr
