"""The pages' blocks in one notebook: each page runs, keeps its promises and prints the same after any other page."""

import json
import subprocess
import sys

import pages
import pasted
import pytest
from compiled_once import fast_environment


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_page_runs_after_every_other(tmp_path):
    command = [sys.executable, "-W", "error", pasted.__file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=fast_environment(), check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(done.stdout) == {page: {} for page in pasted.WITH_BLOCKS}


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """`page_of(code)`: the name of a page with this code."""
    monkeypatch.chdir(tmp_path)

    def make(code):
        path = tmp_path / "page.md"
        path.write_text(f"# Page\n\n```python\n{code}\n```\n")
        monkeypatch.setitem(pages.PAGES, "page.md", path)
        return "page.md"

    return make


def test_a_name_of_another_page_would_be_seen(page_of):
    page = page_of("mesh = mesh + 1\nprint(mesh)")
    names = {"mesh": 3}
    assert pasted.difference(page, {}, "2\n") == "NameError: name 'mesh' is not defined"
    assert pasted.difference(page, names, "2\n") == "prints '4\\n', not '2\\n'"
    assert pasted.difference(page, names, "4\n") is None
    assert names == {"mesh": 3}


def test_a_file_of_another_page_would_be_seen(page_of, tmp_path):
    page = page_of('open("run", "x").close()')
    assert pasted.difference(page, {}, "") is None
    assert pasted.difference(page, {}, "") is None  # the first one's file is gone
    (tmp_path / "run").touch()
    assert pasted.difference(page, {}, "").startswith("FileExistsError")
