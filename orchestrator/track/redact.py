"""Removes credentials from everything that leaves the run directory: trackers and reports are read by many."""

from __future__ import annotations

import re
from typing import Any, TypeVar

HIDDEN = "***"
T = TypeVar("T")

# Whole words only: "token" must not match "tokenizer" or "tokens_per_second", nor "key" match "monkey".
_NAMES = r"(?i:token|secret|webhook|password|passwd|credentials?|api_?key|access_?key(?:_?id)?|private_?key)(?![a-z])"
_SECRET = rf"(?:{_NAMES}|(?<![A-Za-z])(?i:key)(?![A-Za-z]))"
_SECRET_KEY = re.compile(_SECRET)
_IN_URI = re.compile(r"(?<=://)([^\s/@:]*):[^\s/]+(?=@)")
_QUERY_NAMES = r"(?:[\w.-]*(?:token|secret|password|signature|credential|key)|sig)"
_IN_QUERY = re.compile(rf"(?i)([?&]{_QUERY_NAMES}=)[^&\s\"'<]+")
_AWS_ID = re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}\b")
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_VALUE = r"""(?P<value>"[^"\n]+"|'[^'\n]+'|[^\s"',}&{\[]+)"""
_ASSIGNED = re.compile(rf"""(?P<key>{_SECRET}[\w.-]{{0,64}}["']?[ \t]*[:=][ \t]*){_VALUE}""")


def holds_secret(text: str) -> bool:
    """Whether `redact` would hide something of the text."""
    return redact(text) != text


def redact(value: T) -> T:
    """The same text, mapping or list with secrets replaced by ***.

    Hidden are the password of `scheme://user:password@host`, secret query parameters, AWS key ids, and any
    string whose key names a token, secret, password, credential or key.
    """
    return _redact(value)


def hidden_at(value: Any) -> str:
    """The place of the first secret in a document, its keys joined by dots; empty if there is none."""
    return _difference(value, redact(value), "")


def _difference(before: Any, after: Any, where: str) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys: list[Any] = list(before)
    elif isinstance(before, list) and isinstance(after, list):
        keys = list(range(len(before)))
    else:
        return where if before != after else ""
    found = (_difference(before[key], after[key], f"{where}.{key}".lstrip(".")) for key in keys)
    return next((place for place in found if place), "")


def told(error: BaseException) -> str:
    """Why a server was not reached, as one line without secrets: what the network said, where that is the cause, else
    the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:  # the libraries' own errors have no number
            return f"no connection: {cause.strerror}"
        cause = cause.__cause__ or cause.__context__
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _redact(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {key: HIDDEN if _hides(key, item) else _redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_redact(item) for item in value)
    return value


def _hides(key: Any, value: Any) -> bool:
    if not (isinstance(value, str) and value and isinstance(key, str)) or _is_variable(key, value):
        return False
    return bool(_SECRET_KEY.search(key))


def _is_variable(key: str, value: str) -> bool:
    """Whether a webhook is said by the name of a variable; a password may look so."""
    return "webhook" in key and bool(_VARIABLE.fullmatch(value))


def _text(text: str) -> str:
    text = _IN_URI.sub(rf"\1:{HIDDEN}", text)
    text = _IN_QUERY.sub(rf"\1{HIDDEN}", text)
    text = _AWS_ID.sub(HIDDEN, text)
    return _ASSIGNED.sub(_hide_assigned, text)


def _hide_assigned(match: re.Match[str]) -> str:
    value = match["value"]
    bare = value.strip("\"'")
    if re.fullmatch(r"[-+.\d]+|null|true|false|\*\*\*", bare) or _is_variable(match["key"], bare):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['key']}{quote}{HIDDEN}{quote}"
