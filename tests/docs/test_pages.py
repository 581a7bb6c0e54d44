"""README and docs: every Python block runs, every link leads somewhere, every file that is named is there."""

import dataclasses
import pkgutil
import re
import subprocess
import sys

import pytest
from compiled_once import fast_environment
from pages import AFTER, PAGES, RECIPES, ROOT, WITHOUT_DEVICES, blocks_of

from jaxshard.apps.config.config import Config
from jaxshard.pipelining.timetable import Plan, chart

RUNNER = ROOT / "tests" / "docs" / "pages.py"
WITH_BLOCKS = [name for name, path in PAGES.items() if blocks_of(path) and name not in RECIPES]  # tests/habits: those
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = "configs|examples|benchmarks|docs|notebooks|scripts|launch|tests|jaxshard"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./]+)`")
PARTS = "|".join(field.name for field in dataclasses.fields(Config))
OPTION = re.compile(rf"`(?:--)?((?:{PARTS})\.(?!safetensors)[\w-]+)")


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_page_runs(name, tmp_path):
    """In a process of its own, outside of the checkout, where any warning is an error."""
    command = [sys.executable, "-W", "error", str(RUNNER), name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=fast_environment(), check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def test_pages_with_promises_have_blocks():
    assert set(AFTER) | WITHOUT_DEVICES <= set(WITH_BLOCKS)


def test_every_python_block_is_found():
    for name, path in PAGES.items():
        assert len(blocks_of(path)) == path.read_text().count("```python\n"), name


def test_the_chart_in_the_guide_is_the_schedules():
    assert chart(Plan(4, 6), "1f1b") in PAGES["docs/parallelism.md"].read_text()


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name):
    for path in NAMED.findall(PAGES[name].read_text()):
        assert (ROOT / path).exists() or list(ROOT.glob(path + "*")), path


@pytest.mark.parametrize("name", PAGES)
def test_named_functions_exist(name):
    for path in re.findall(r"`(jaxshard(?:\.\w+)+)", PAGES[name].read_text()):
        assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("name", PAGES)
def test_named_options_of_the_trainer_exist(name):
    for option in OPTION.findall(PAGES[name].read_text()):
        part, key = option.replace("-", "_").split(".")
        assert hasattr(getattr(Config(), part), key.removeprefix("no_")), option


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """Of links within the repository; what is after a `#` must be a heading there."""
    for link in LINK.findall(PAGES[name].read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text()), link


def anchors_of(text):
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


MAX_WORDS = 800


def unbroken_words(text):
    """The most words of prose between two pictures or blocks of code; tables and directives aside."""
    lines = re.sub(r"^```.*?^```|!\[[^\]]*\]\([^)]*\)|^:img-bottom: .*?$", "\0", text, flags=re.S | re.M).splitlines()
    parts = "\n".join(line for line in lines if not line.lstrip().startswith("|")).split("\0")
    return max(len(part.split()) for part in parts)


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_long_without_a_picture_or_code(name):
    text = PAGES[name].read_text()
    assert unbroken_words(text) <= MAX_WORDS
    assert len(text.split()) <= MAX_WORDS or re.search(r"^```|!\[|^:img-bottom:", text, re.M), "add a picture or code"


def test_a_long_page_would_be_seen():
    long = "word " * 801
    assert unbroken_words(long) == 801
    assert unbroken_words(f"{long[:2000]}\n:img-bottom: a.png\n{long[:2000]}") == 400
    assert unbroken_words(f"{long[:2000]}\n```sh\n{long}\n```\n![a](b.png)\n| {long} |\n") == 400


def test_a_wrong_name_would_be_seen():
    assert OPTION.findall("`--sharding.no-such 3`, `train.rows`") == ["sharding.no-such", "train.rows"]
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("jaxshard.zero4")


def test_a_dead_link_would_be_seen():
    assert LINK.findall("see [the\npage](docs/nothing.md#here) and ![a](b.png)") == ["docs/nothing.md#here", "b.png"]
    assert anchors_of("# Which schedule?\n## F1, F2") == {"which-schedule", "f1-f2"}
