from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cleaning_texts import PROSE

from orchestrator.config.errors import InputError
from orchestrator.data.clean import document_rules
from orchestrator.data.clean.config import Language, Normalize, Own, Url
from orchestrator.data.clean.removed import Removed


def lists(**given: list[str]) -> dict[str, frozenset[str]]:
    return {name: frozenset(given.get(name, [])) for name in Url.LISTS}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("https://bad.org/a", "its domain"), ("http://www.BAD.org:8080/a", "its domain"), ("bad.org/a", "its domain"),
        ("https://notbad.org/a", ""), ("https://bad.org.good.com/", ""), ("https://good.com/page", "its address"),
        ("https://good.com/page2", ""), ("https://x.com/Casino-night", "a word of its address"),
        ("https://x.com/casinos", ""), ("https://x.com/free-poker", "words of its address"), ("https://x.com/free", ""),
        ("https://x.com/xp.orn-y", "a part of its address"), ("", "no address"), (None, "no address"),
        (7, "no address"),
        ("https://[broken", ""),
    ],
)  # fmt: skip
def test_documents_go_by_their_address(address: object, reason: str) -> None:
    given = lists(
        domains=["Bad.org"],
        urls=["https://good.com/page"],
        words=["casino"],
        soft_words=["free", "poker"],
        parts=["porn"],
    )
    found = document_rules.url(Url(column="link"), given)("text", {"link": address})
    assert found == (Removed(reason) if reason else "text")


def test_an_address_may_be_inside_a_column() -> None:
    step = document_rules.url(
        Url(column="meta.url"), lists(domains=["https://bad.org/", "*.worse.org", ".worst.org"])
    )
    for host, kept in (("bad.org", False), ("a.worse.org", False), ("worst.org", False), ("good.org", True)):
        found = step("text", {"meta": {"url": f"https://{host}/page"}})
        assert found == ("text" if kept else Removed("its domain"))


@pytest.mark.parametrize(
    ("name", "entry", "why"),
    [
        ("parts", "порно", "no letter from a to z"), ("words", "порно", "no letter"), ("words", "sex-shop", "one word"),
        ("soft_words", "two words", "one word"), ("domains", "bad.org/page", "a host"), ("domains", "*", "a host"),
        ("domains", "a.*.org", "a host"), ("domains", "Bad.org", ""), ("domains", "https://bad.org/", ""),
        ("words", "casino", ""), ("parts", "sex-shop", ""), ("urls", "https://x.com/ю", ""),
    ],
)  # fmt: skip
def test_an_entry_that_would_mean_nothing_or_all_is_none(name: str, entry: str, why: str) -> None:
    assert bool(why) == bool(found := document_rules.unusable(name, entry))
    assert why in found


def test_languages_are_told_apart() -> None:
    german = "Der Fluss ist hier breit, und die Leute der Stadt haben immer mit ihm gelebt. Im Sommer baden sie darin."
    keep = document_rules.language(Language(keep=["en"]))
    assert keep(PROSE, {}) == PROSE
    assert keep(german, {}) == Removed("de")
    assert document_rules.language(Language(keep=["en", "de"]))(german, {}) == german
    assert document_rules.language(Language(keep=["en"], min_score=1.0))(PROSE, {}) == Removed(
        "en, too unsure"
    )
    with pytest.raises(InputError, match="no language is called english"):
        document_rules.language(Language(keep=["english"]))


def test_unicode_is_normalised_and_repaired() -> None:
    assert document_rules.normalize(Normalize())("e\u0301 \ufb01", {}) == "\u00e9 \ufb01"
    assert document_rules.normalize(Normalize(form="NFKC"))("\ufb01", {}) == "fi"
    assert document_rules.normalize(Normalize(fix=True))("itâ€™s", {}) == "it's"


def test_a_step_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(InputError, match=r"normalize with fix needs ftfy; install it: .*\[data\]"):
        document_rules.normalize(Normalize(fix=True))


def test_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_steps.py").write_text(
        "def keep(text, row, least=3):\n    return text.upper() + row.get('mark', '') if len(text) >= least else None\n"
        "def told(text, row):\n    return str(row)\n"
        "def wrong(text, row):\n    return 3\n"
        "def half(text, row):\n    return chr(0xd800)\n"
        "value = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    keep = document_rules.own(Own(function="own_steps:keep", options={"least": 2}, columns=["mark"]))
    assert keep("ab", {"mark": "!"}) == "AB!"
    inner = document_rules.own(Own(function="own_steps:told", columns=["meta.score", "gone", "null"]))
    assert inner("ab", {"meta": {"score": 3}, "more": 1, "null": None}) == "{'meta.score': 3}"
    assert document_rules.own(Own(function="own_steps:told"))("ab", {"more": 1}) == "{}"
    assert keep("a", {}) == Removed("own_steps:keep")
    for name, problem in (
        ("wrong", "returned int instead of text"),
        ("half", "returned str instead of text"),
    ):
        with pytest.raises(InputError, match=problem):
            document_rules.own(Own(function=f"own_steps:{name}"))("text", {})
    for name, problem in (("value", "is not a function"), ("missing", "has no missing")):
        with pytest.raises(InputError, match=problem):
            document_rules.own(Own(function=f"own_steps:{name}"))
    with pytest.raises(InputError, match="there is no module"):
        document_rules.own(Own(function="no_such_module_at_all:f"))
