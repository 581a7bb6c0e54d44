"""The notebook: its two files agree, it runs as it stands, and what is committed was run and names no machine.

To write the .ipynb again after a change of the .py:
    jupytext --to ipynb notebooks/01_shard_your_optimizer.py
    jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False \\
        notebooks/01_shard_your_optimizer.ipynb
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
SCRIPT = ROOT / "notebooks" / "01_shard_your_optimizer.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
MAX_BYTES = 600_000
NUM_FIGURES = 5
TELLTALE = re.compile(r"(?<![\w.:/])/(?!/)[\w.-]+/[\w.-]|\b[A-Za-z]:\\\\|~/|papermill|\d{4}-\d\d-\d\dT")


def cells(path):
    """[(cell type, source)], as jupytext reads either file; in a process of its own, as Jupyter's imports may warn."""
    code = (
        "import json, sys, jupytext; "
        "print(json.dumps([(cell.cell_type, cell.source) for cell in jupytext.read(sys.argv[1]).cells]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outputs(notebook):
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def printed(notebook):
    return "".join("".join(output["text"]) for output in outputs(notebook) if output["output_type"] == "stream")


def number_after(text, label):
    found = re.search(rf"^{re.escape(label)}: ([\d.e+-]+)$", text, re.MULTILINE)
    assert found, f"{label!r} is not in the output:\n{text}"
    return float(found[1])


def check_results(notebook):
    """What the notebook promises, in the words it prints: same loss, less memory, exact."""
    text = printed(notebook)
    assert 0 <= number_after(text, "largest difference of the losses") < 1e-4
    assert 0 <= number_after(text, "largest relative difference to one device, in float64") < 1e-12
    rows = re.findall(r"^(ddp|zero\d) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
    total = {name: int(columns[-1].replace(",", "")) for name, *columns in rows}
    assert total["zero1"] / total["ddp"] == pytest.approx(5.5 / 16, rel=0.01)
    assert total["zero2"] / total["ddp"] == pytest.approx(5.5 / 16, rel=0.01)
    assert total["zero3"] / total["ddp"] == pytest.approx(2 / 16, rel=0.01)
    assert len(re.findall(r"sent per device and step, (?:1\.00|0\.99)\d\d x the formula", text)) == 4
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == NUM_FIGURES


@pytest.fixture(scope="module")
def committed():
    return json.loads(NOTEBOOK.read_text())


def test_script_and_notebook_have_the_same_cells():
    script, notebook = cells(SCRIPT), cells(NOTEBOOK)
    assert len(script) > 20
    assert script == notebook


def test_committed_notebook_was_executed_from_top_to_bottom(committed):
    code = [cell for cell in committed["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for output in outputs(committed)} <= {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs(committed) if "name" in output} == {"stdout"}  # nothing warned
    check_results(committed)


def test_committed_notebook_names_no_machine(committed):
    """No absolute paths and no times; pictures left out, as base64 has slashes too."""
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    assert committed["metadata"]["kernelspec"]["name"] == "python3"
    for output in outputs(committed):
        output.get("data", {}).pop("image/png", None)
    found = TELLTALE.search(text := json.dumps(committed))
    assert not found, text[max(0, found.start() - 60) : found.end() + 60]


@pytest.mark.parametrize("told", ["/home/someone/x.py", 'File "/tmp/a.py"', r"C:\Users", "~/x", "2026-01-02T03:04:05"])
def test_a_path_or_a_time_would_be_seen(told):
    assert TELLTALE.search(json.dumps({"text": [told]}))


def test_notebook_runs(tmp_path):
    """Papermill, with a kernel that is surely this interpreter and imports this checkout."""
    kernel = tmp_path / "share" / "kernels" / "this-python"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "this", "language": "python"}))
    environment = os.environ | {
        "JUPYTER_PATH": str(tmp_path / "share"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if not AS_USERS_COMPILE:
        environment["XLA_FLAGS"] = fast_flags()
    environment.pop("MPLBACKEND", None)  # the kernel's own backend puts the pictures into the notebook
    result = tmp_path / "result.ipynb"
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(result), "--kernel", "this-python"]
    command += ["--cwd", str(tmp_path), "--no-progress-bar", "--execution-timeout", "300"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check_results(json.loads(result.read_text()))
