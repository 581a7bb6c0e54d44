"""The notebooks: the two files of each agree, it runs as it stands, and what is committed was run and names no machine.

To write the .ipynb of one again after a change of its .py (`make notebooks` does it for all):
    jupytext --to ipynb notebooks/NAME.py
    jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/NAME.ipynb
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_once import AS_USERS_COMPILE, fast_flags

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
MAX_BYTES = 600_000
TELLTALE = re.compile(r"(?<![\w.:/])/(?!/)[\w.-]+/[\w.-]|\b[A-Za-z]:\\\\|~/|papermill|\d{4}-\d\d-\d\dT")
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/{}.ipynb)"
)
INSTALL = re.compile(r'^# On Colab: %pip install --quiet (jaxshard|"jaxshard\[[\w,-]+\]") matplotlib$', re.M)
SHOWS = re.compile(r"^(?:plt\.show\(\)|(?:display\()?Image\()", re.MULTILINE)
PICTURES = {"image/png", "image/svg+xml"}

every_notebook = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def cells(path):
    """[(cell type, source)], as jupytext reads either file; in a process of its own, as Jupyter's imports may warn."""
    code = (
        "import json, sys, jupytext; "
        "print(json.dumps([(cell.cell_type, cell.source) for cell in jupytext.read(sys.argv[1]).cells]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read(path):
    return json.loads(path.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def printed(notebook):
    return "".join("".join(output["text"]) for output in outputs(notebook) if output["output_type"] == "stream")


def number_after(text, label):
    found = re.search(rf"^{re.escape(label)}: ([\d.e+-]+)$", text, re.MULTILINE)
    assert found, f"{label!r} is not in the output:\n{text}"
    return float(found[1])


def check_shard_your_optimizer(text):
    """Same loss, less memory, exact."""
    assert 0 <= number_after(text, "largest difference of the losses") < 1e-4
    assert 0 <= number_after(text, "largest relative difference to one device, in float64") < 1e-12
    rows = re.findall(r"^(ddp|zero\d) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
    total = {name: int(columns[-1].replace(",", "")) for name, *columns in rows}
    assert total["zero1"] / total["ddp"] == pytest.approx(5.5 / 16, rel=0.01)
    assert total["zero2"] / total["ddp"] == pytest.approx(5.5 / 16, rel=0.01)
    assert total["zero3"] / total["ddp"] == pytest.approx(2 / 16, rel=0.01)
    assert len(re.findall(r"sent per device and step, (?:1\.00|0\.99)\d\d x the formula", text)) == 4


# What a notebook promises, in the words it prints.
PROMISES = {"01_shard_your_optimizer": check_shard_your_optimizer}


def check_figures(notebook):
    """Each cell that shows a picture has it among its outputs."""
    for cell in code_cells(notebook):
        promised = len(SHOWS.findall(source := "".join(cell["source"])))
        assert sum(bool(PICTURES & {*output.get("data", {})}) for output in cell["outputs"]) >= promised, source


def check_results(notebook, name):
    check_figures(notebook)
    if name in PROMISES:
        PROMISES[name](printed(notebook))


def test_every_notebook_has_two_files():
    assert len(SCRIPTS) >= 1
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in SCRIPTS}
    assert {*PROMISES} <= {path.stem for path in SCRIPTS}


@every_notebook
def test_script_and_notebook_have_the_same_cells(script):
    of_script, of_notebook = cells(script), cells(script.with_suffix(".ipynb"))
    assert len(of_script) > 8
    assert of_script == of_notebook


@every_notebook
def test_first_cells_say_what_to_expect_and_open_in_colab(script):
    """A title, what one learns, how long it takes, the badge; then how to install."""
    (kind, first), *_ = all_cells = cells(script)
    assert kind == "markdown"
    assert re.match(r"# \S", first)
    assert re.search(r"\b(?:minutes?|seconds)\b", first)
    assert re.findall(r"\[!\[.*", first) == [BADGE.format(script.stem)]
    first_code = next(source for kind, source in all_cells if kind == "code")
    assert INSTALL.search(first_code)


@every_notebook
def test_committed_notebook_was_executed_from_top_to_bottom(script):
    committed = read(script.with_suffix(".ipynb"))
    code = code_cells(committed)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for output in outputs(committed)} <= {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs(committed) if "name" in output} == {"stdout"}  # nothing warned
    check_results(committed, script.stem)


@every_notebook
def test_committed_notebook_names_no_machine(script):
    """No absolute paths and no times; pictures left out, as base64 has slashes too."""
    notebook = script.with_suffix(".ipynb")
    committed = read(notebook)
    assert notebook.stat().st_size < MAX_BYTES
    assert committed["metadata"]["kernelspec"]["name"] == "python3"
    for output in outputs(committed):
        for kind in PICTURES:
            output.get("data", {}).pop(kind, None)
    found = TELLTALE.search(text := json.dumps(committed))
    assert not found, text[max(0, found.start() - 60) : found.end() + 60]


@pytest.mark.parametrize("told", ["/home/someone/x.py", 'File "/tmp/a.py"', r"C:\Users", "~/x", "2026-01-02T03:04:05"])
def test_a_path_or_a_time_would_be_seen(told):
    assert TELLTALE.search(json.dumps({"text": [told]}))


def test_a_missing_picture_would_be_seen():
    cell = {"cell_type": "code", "source": ["axes.plot(x)\n", "plt.show()"], "outputs": []}
    with pytest.raises(AssertionError, match=r"axes\.plot"):
        check_figures({"cells": [cell]})
    check_figures({"cells": [cell | {"outputs": [{"output_type": "display_data", "data": {"image/png": ""}}]}]})


@every_notebook
def test_notebook_runs(script, tmp_path):
    """Papermill, in an empty folder, with a kernel that is surely this interpreter and imports this checkout."""
    kernel = tmp_path / "share" / "kernels" / "this-python"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "this", "language": "python"}))
    environment = os.environ | {
        "JUPYTER_PATH": str(tmp_path / "share"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": str(ROOT),  # without libtpu, which ends where XLA_FLAGS has flags that it does not know
    }
    if not AS_USERS_COMPILE:
        environment["XLA_FLAGS"] = fast_flags()
    environment.pop("MPLBACKEND", None)  # the kernel's own backend puts the pictures into the notebook
    result = tmp_path / "result.ipynb"
    (fresh := tmp_path / "fresh").mkdir()
    command = [sys.executable, "-m", "papermill", str(script.with_suffix(".ipynb")), str(result)]
    command += ["--kernel", "this-python", "--cwd", str(fresh), "--no-progress-bar", "--execution-timeout", "300"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check_results(read(result), script.stem)
