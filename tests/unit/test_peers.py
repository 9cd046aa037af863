"""The page of other projects' suites: its numbers are those of the tests, and it is up to date."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from types import ModuleType

import differences
import peers
import pytest
from differences import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from orchestrator.launch import doctor


def test_the_page_is_what_the_tables_say() -> None:
    """`python tests/peers.py` writes it."""
    assert peers.PAGE.read_text() == peers.page()


def test_every_named_test_is_there() -> None:
    assert differences.missing([test for suite in peers.SUITES.values() for test in suite.tests]) == []


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer", ROOT / "tests" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases_of(test: str) -> int:
    """How many cases a test has by its parameters."""
    path, _, name = test.partition("::")
    marks = getattr(getattr(loaded(path), name), "pytestmark", [])
    return math.prod(len(list(mark.args[1])) for mark in marks if mark.name == "parametrize")


@pytest.mark.parametrize("name", [name for name, suite in peers.SUITES.items() if not suite.counts])
def test_a_suite_has_as_many_cases_as_its_tests(name: str) -> None:
    """The others count their cases themselves."""
    suite = peers.SUITES[name]
    assert sum(map(cases_of, suite.tests)) == suite.cases


def test_templates_that_write_less_are_counted() -> None:
    answers = loaded(peers.ANSWERS)
    refused = {
        (name, kind)
        for name in answers.PUBLIC
        for kind, talk in answers.TALKS.items()
        if answers.why_refused(name, talk)
    }
    assert len(refused) == peers.SUITES["templates"].differ
    trained = [name for name in answers.PUBLIC if (answers.FOLDER / f"{name}_training.jinja").exists()]
    unlike = {
        (name, kind)
        for name in trained
        for kind in answers.TALKS
        if {(name, kind), (name, "*")} & answers.UNLIKE.keys() or (name, kind) in refused
    }
    assert len(unlike) == peers.SUITES["training-templates"].differ


def test_the_doctor_tells_what_is_broken() -> None:
    """The doctor warns of each version that breaks a contract, unless pyproject.toml excludes it."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    allowed = {need.name: need.specifier for need in map(Requirement, lines)}
    known = [dict(each.versions) for each in doctor.KNOWN]
    for row in peers.BROKEN:
        (name, versions), *others = row.versions.items()
        excluded = not others and name in doctor.PACKAGES and is_outside(versions, allowed[name])
        assert excluded or dict(row.versions) in known, row


def is_outside(versions: str, bounds: SpecifierSet) -> bool:
    """Whether versions such as <5.4 are all below bounds such as >=5.4, or such as >=2.14 above <2.14."""
    opposite = versions.replace("<", ">=") if versions.startswith("<") else versions.replace(">=", "<")
    (allowed,) = SpecifierSet(opposite)
    return allowed in set(bounds)
