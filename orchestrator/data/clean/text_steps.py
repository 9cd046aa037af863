"""Steps that look at one document: its Unicode form, its language, its address, personal data, and own functions.

Like datatrove 0.10 where that has the rule. Different on purpose: a replacement is always the same, where datatrove
takes the next of a list, which depends on the documents before; an entry of `domains` means the host and all below it,
where datatrove looks into a list of public suffixes; the language is found by py3langid and not by fastText, in a
document's beginning.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.config.own_code import cleaning_function
from orchestrator.data.clean.config import Language, Normalize, Own, Pii, Url
from orchestrator.data.clean.removed import Removed
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.repair import is_unicode

Row = Mapping[str, Any]
Decide = Callable[[str, Row], str | Removed]
"""The text that is kept of a document, or why it is removed; its row has the columns that the step needs."""

_EMAIL = re.compile(
    r"\b[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*"
    r"[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?|\[(?:(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}"
    r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?|[A-Za-z0-9-]*[A-Za-z0-9]:)])"
)
_IP = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)")
_PHONE = re.compile(
    r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}|\(\d{3}\) ?\d{3}[ .-]\d{4}"
    r"|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)"
)
PATTERNS = {"email": _EMAIL, "ip": _IP, "phone": _PHONE}
INSTEAD = {"email": "email@example.com", "ip": "192.0.2.1", "phone": "555-0100"}
"""Addresses and numbers that are kept free for examples (RFC 2606, RFC 5737)."""
_NOT_LETTERS = re.compile(r"[^a-zA-Z0-9]+")


def needs_extra(step: str, module: str) -> Any:
    """The module of the extra `data` that a step needs. Raises InputError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        hint = f"install it: {install('data')}"
        raise InputError(f"{step} needs {module}", "data.clean", hint) from None


def normalize(rule: Normalize) -> Decide:
    """Text in one Unicode form, repaired if that is asked for. Raises InputError if ftfy is needed and missing."""
    if not rule.fix:
        return lambda text, row: unicodedata.normalize(rule.form, text)
    ftfy = needs_extra("normalize with fix", "ftfy")
    config = ftfy.TextFixerConfig(normalization=rule.form, explain=False)
    return lambda text, row: ftfy.fix_text(text, config)


def identifier() -> Any:
    """The model that tells languages, with probabilities. Raises InputError without py3langid."""
    langid = needs_extra("language", "py3langid.langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def language(rule: Language) -> Decide:
    """Keep documents whose most probable language is one of `keep`. Raises InputError without py3langid, and for a
    language that it does not know."""
    model = identifier()
    if unknown := sorted(set(rule.keep) - set(model.labels)):
        hint = "give ISO 639 codes, as in en"
        raise InputError(f"no language is called {', '.join(unknown)}", "data.clean.language.keep", hint)

    def decide(text: str, row: Row) -> str | Removed:
        found, score = model.classify(text[: rule.characters])
        if found not in rule.keep:
            return Removed(found)
        return text if score >= rule.min_score else Removed(f"{found}, too unsure")

    return decide


def url(rule: Url, lists: Mapping[str, frozenset[str]]) -> Decide:
    """Remove documents whose address is in one of the `lists`, by the names of the rule's options."""
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
        found = {part.lower() for part in _NOT_LETTERS.split(address)}
        if words & found:
            return Removed("a word of its address")
        if soft and len(soft & found) >= rule.soft_limit:
            return Removed("words of its address")
        letters = _letters(address)
        return Removed("a part of its address") if any(part in letters for part in parts) else text

    return decide


def unusable(name: str, entry: str) -> str:
    """Why an entry of a list of the rule `url` would mean nothing, or everything; empty if it is sound."""
    if name == "domains":
        return "" if re.fullmatch(r"[^\s/:*?#@]+\.?", _domain(entry)) else "is no host"
    if name == "urls":
        return ""
    if not _letters(entry):
        return "has no letter from a to z and no digit, by which addresses are compared"
    if name != "parts" and _NOT_LETTERS.search(entry):
        return "is not one word of letters from a to z and digits, into which an address is divided"
    return ""


def _domain(entry: str) -> str:
    """A host as it is written with a protocol, or with a star or a dot before it."""
    return entry.lower().partition("://")[2 if "://" in entry else 0].removeprefix("*").strip("./")


def _letters(text: str) -> str:
    return _NOT_LETTERS.sub("", text).lower()


def _host(address: str) -> str:
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""


def pii(rule: Pii) -> Decide:
    """Replace personal data, or remove documents with some."""

    def instead(kind: str, match: re.Match[str]) -> str:
        found = match.group()
        return INSTEAD[kind] if kind != "ip" or _is_meant(found, rule.private_ips) else found

    def decide(text: str, row: Row) -> str | Removed:
        for kind in rule.kinds:
            after = PATTERNS[kind].sub(partial(instead, kind), text)
            if after != text and rule.action == "drop":
                return Removed(kind)
            text = after
        return text

    return decide


def _is_meant(address: str, private: bool) -> bool:
    try:
        return private or ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def own(rule: Own) -> Decide:
    """A function of the user's: what it returns is kept, None removes the document. Raises InputError if it cannot be
    imported, or returns anything else."""
    called = cleaning_function(rule)

    def decide(text: str, row: Row) -> str | Removed:
        # What is read of a file beside the text goes by its kind.
        asked = {name: value for name in rule.columns if (value := value_of(row, name)) is not None}
        try:
            found = called(text, asked, **rule.options)
        except Exception as error:
            raise _wrong(rule, f"failed ({type(error).__name__}: {error}) on {text[:80]!r}") from None
        if found is None:
            return Removed(rule.function)
        if not isinstance(found, str) or not is_unicode(found):
            raise _wrong(rule, f"returned {type(found).__name__} and no text on {text[:80]!r}")
        return found

    return decide


def _wrong(rule: Own, what: str) -> InputError:
    return InputError(
        what, f"data.clean.own {rule.function}", "mend it; it must be importable where the data is made"
    )
