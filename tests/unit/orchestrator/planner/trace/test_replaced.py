"""An attribute that is replaced while a step is traced is restored afterwards."""

from __future__ import annotations

import types

import pytest

from orchestrator.planner.trace.replaced import replaced


class Base:
    """A class with a method."""

    def answer(self) -> int:
        return 1


class Derived(Base):
    """Inherits the method."""


def test_a_function_of_a_module_is_restored_after_an_error() -> None:
    module = types.ModuleType("module")
    original = module.answer = lambda: 1  # type: ignore[attr-defined]
    answers = []

    def fail() -> None:
        with replaced(module, "answer", lambda: 2):
            answers.append(module.answer())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert answers == [2]
    assert module.answer is original


def test_an_inherited_method_is_inherited_again() -> None:
    with replaced(Derived, "answer", lambda _: 2):
        assert (Derived().answer(), Base().answer()) == (2, 1)
    assert "answer" not in vars(Derived)
    assert Derived().answer() == 1


def test_an_attribute_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError), replaced(Derived, "question", 1):
        pass
