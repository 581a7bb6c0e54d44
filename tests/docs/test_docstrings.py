"""Every example in a docstring runs; sybil finds them, and gives them the names of their module."""

import pytest
from pages import ROOT
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.rest import DocTestParser

SYBIL = Sybil(parsers=[DocTestParser()], document_types={".py": PythonDocStringDocument})
MODULES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "jaxshard").rglob("*.py"))}
EXAMPLES_BEFORE = 38  # that the docstrings had when this was written: there may only be more


def examples_of(path):
    return list(SYBIL.parse(path).examples())


WITH_EXAMPLES = [name for name, path in MODULES.items() if examples_of(path)]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    for example in examples_of(MODULES[name]):
        example.evaluate()


def test_there_are_examples():
    assert sum(len(examples_of(MODULES[name])) for name in WITH_EXAMPLES) >= EXAMPLES_BEFORE


def test_a_wrong_example_fails(tmp_path):
    page = tmp_path / "wrong.py"
    page.write_text('def one():\n    """Is 1.\n\n    >>> one()\n    2\n    """\n    return 1\n')
    (example,) = examples_of(page)
    example.document.evaluators.clear()
    example.namespace["one"] = lambda: 1
    with pytest.raises(AssertionError, match="Expected"):
        example.evaluate()
