"""Steps that look at one document: Unicode form, language, address, and the user's functions.

datatrove decides by address and language in its own way. Its list of public suffixes and its fastText model are fetched
when a filter is made, and so differ from day to day and from node to node. Here an entry of `domains` covers the host
and all its subdomains, and py3langid detects the language from the beginning of a document.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.config.own_code import cleaning_function
from orchestrator.data.clean.config import Language, Normalize, Own, Url
from orchestrator.data.clean.removed import Removed
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.repair import is_unicode

Row = Mapping[str, Any]
Decide = Callable[[str, Row], str | Removed]
"""Returns the text that is kept of a document, or why it is removed. Its row has the columns that the step needs."""

_NOT_LETTERS = re.compile(r"[^a-zA-Z0-9]+")


def needs_extra(step: str, module: str, extra: str = "data") -> Any:
    """Return a module of the `extra` that a step needs. Raises InputError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise InputError(f"{step} needs {library}", "data.clean", f"install it: {install(extra)}") from None


def normalize(rule: Normalize) -> Decide:
    """Return a step that rewrites text in one Unicode form, after optional repair. Raises InputError if ftfy is
    missing.
    """
    if not rule.fix:
        return lambda text, row: unicodedata.normalize(rule.form, text)
    ftfy = needs_extra("normalize with fix", "ftfy")
    config = ftfy.TextFixerConfig(normalization=rule.form, explain=False)
    return lambda text, row: ftfy.fix_text(text, config)


def identifier() -> Any:
    """Return the model that detects languages, with probabilities. Raises InputError without py3langid."""
    langid = needs_extra("language", "py3langid.langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def language(rule: Language) -> Decide:
    """Return a step that keeps documents whose most probable language is in `keep`.

    Raises InputError without py3langid, and for an unknown language.
    """
    model = identifier()
    if unknown := sorted(set(rule.keep) - set(model.labels)):
        hint = "give ISO 639 codes, as in en"
        raise InputError(f"no language is called {', '.join(unknown)}", "data.clean.language.keep", hint)

    def decide(text: str, row: Row) -> str | Removed:
        language, score = model.classify(text[: rule.characters])
        if language not in rule.keep:
            return Removed(language)
        return text if score >= rule.min_score else Removed(f"{language}, too unsure")

    return decide


def url(rule: Url, lists: Mapping[str, frozenset[str]]) -> Decide:
    """Return a step that removes documents whose address is in one of the `lists`, keyed by the rule's options."""
    domains = {_domain(entry) for entry in lists["domains"]}
    urls = lists["urls"]
    words, soft, parts = (
        {_letters(entry) for entry in lists[name]} for name in ("words", "soft_words", "parts")
    )

    def decide(text: str, row: Row) -> str | Removed:
        address = value_of(row, rule.column)
        if not isinstance(address, str) or not address:
            return Removed("no address")
        host = _host(address).split(".")
        if any(".".join(host[n:]) in domains for n in range(len(host))):
            return Removed("its domain")
        if address in urls:
            return Removed("its address")
        words_of_address = {part.lower() for part in _NOT_LETTERS.split(address)}
        if words & words_of_address:
            return Removed("a word of its address")
        if soft and len(soft & words_of_address) >= rule.soft_limit:
            return Removed("words of its address")
        letters = _letters(address)
        return Removed("a part of its address") if any(part in letters for part in parts) else text

    return decide


def unusable(name: str, entry: str) -> str:
    """Return why an entry of a `url` list would match nothing, or everything; empty if it is sound."""
    if name == "domains":
        return "" if re.fullmatch(r"[^\s/:*?#@]+\.?", _domain(entry)) else "is not a host"
    if name == "urls":
        return ""
    if not _letters(entry):
        return "has no letter from a to z and no digit, by which addresses are compared"
    if name != "parts" and _NOT_LETTERS.search(entry):
        return "is not one word of letters from a to z and digits, into which an address is divided"
    return ""


def _domain(entry: str) -> str:
    """Return the host of an entry that may begin with a protocol, a star or a dot."""
    return entry.lower().partition("://")[2 if "://" in entry else 0].removeprefix("*").strip("./")


def _letters(text: str) -> str:
    return _NOT_LETTERS.sub("", text).lower()


def _host(address: str) -> str:
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""


def own(rule: Own) -> Decide:
    """Return the step of a user's function: its result is kept, and None removes the document.

    Raises InputError if the function cannot be imported. The step raises it if the function fails or returns anything
    but text or None.
    """
    called = cleaning_function(rule)

    def decide(text: str, row: Row) -> str | Removed:
        # Columns of a file depend on its format, and nulls are not passed.
        columns = {name: value for name in rule.columns if (value := value_of(row, name)) is not None}
        try:
            result = called(text, columns, **rule.options)
        except Exception as error:
            raise _wrong(rule, f"failed ({type(error).__name__}: {error}) on {text[:80]!r}") from None
        if result is None:
            return Removed(rule.function)
        if not isinstance(result, str) or not is_unicode(result):
            raise _wrong(rule, f"returned {type(result).__name__} instead of text for {text[:80]!r}")
        return result

    return decide


def _wrong(rule: Own, problem: str) -> InputError:
    return InputError(
        problem, f"data.clean.own {rule.function}", "fix it; it must be importable where the data is made"
    )
