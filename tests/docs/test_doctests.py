"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import jaxshard

MODULES = [
    "jaxshard",
    *(m.name for m in pkgutil.walk_packages(jaxshard.__path__, "jaxshard.") if "__main__" not in m.name),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(found) >= 5
