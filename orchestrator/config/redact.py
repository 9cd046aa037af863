"""Remove credentials from everything that others may read: run directories, trackers, reports, logs and messages."""

from __future__ import annotations

import re
from typing import Any, TypeVar

HIDDEN = "***"
T = TypeVar("T")

# Whole words only: "token" must not match "tokenizer" or "tokens_per_second", nor "key" match "monkey".
_KEYS = r"(?:api|access|account|private|secret|shared|signing)[_-]?key(?:_?id)?"
_NAMES = r"token|secret|webhook|passwords?|passwd|passphrase|credentials?|authorization|cookies?(?!\.)"
_WORDS = rf"(?i:{_NAMES}|{_KEYS})(?![a-z])"
_SHORT = r"(?<![A-Za-z])(?:(?i:key)|[Pp]wd)(?![A-Za-z])|_PASS(?![A-Za-z_])|(?i:db|user|smtp)_?pass(?![a-z])"
_SECRET = rf"(?:{_WORDS}|{_SHORT})"
_SECRET_KEY = re.compile(_SECRET)
_PASSWORD = re.compile(r"(?i)(?:pass(?:words?|wd|phrase)?|pwd|secret)\W*$")
"""Endings of names whose value is a secret even if it is a number."""
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_VALUE = r"""(?P<value>"(?:\\.|[^"\\\n])+"|'(?:\\.|[^'\\\n])+'|["']?[^\s"',}&{\[]+)"""
_ASSIGNED = re.compile(rf"""(?P<key>{_SECRET}[\w.-]{{0,64}}["']?[ \t]*[:=][ \t]*){_VALUE}""")
_SET = re.compile(rf"""(?P<key>{_SECRET}[\w.-]{{0,64}}=){_VALUE}""")

# A password may contain any character. It ends at the last "@" before the host. A number followed by "/" is a port.
_PASSWORD_IN_URI = re.compile(
    r"""(?<=://)([^\s/@:?#"'<>]*):(?!\d{1,5}[/?#,])(?:(?!://)[^\s"'<>]){1,500}?"""
    r"""(?=@[\w\[*$-])(?!@[^\s/"'<>]{0,200}@)"""
)
_USER_OF_HTTP = re.compile(r"""(?i)(\bhttps?://)[^\s/@:?#"'<>]+(?=@)""")
_QUERY_NAMES = r"(?:[\w.-]*(?:token|secret|password|signature|credential|key|auth)|sig)"

_BY_FORM = (
    (_PASSWORD_IN_URI, rf"\1:{HIDDEN}"),
    (_USER_OF_HTTP, rf"\1{HIDDEN}"),
    # webhook addresses are secrets
    (
        re.compile(
            r"""(?i)(://(?:hooks?\.[\w.-]{1,100}/(?:services/)?|[\w.-]{1,100}/(?:[\w-]{1,40}/){0,3}webhook\w{0,9}/))"""
            r"""[^\s"'<>]+"""
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(?i)([?&]{_QUERY_NAMES}=)[^&\s\"'<]+"), rf"\1{HIDDEN}"),
    # keys and tokens recognised by their prefix: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack; a JSON web token
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}\b"), HIDDEN),
    (re.compile(r"\b(?:gh[pousr]_|hf_)[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"), HIDDEN),
    (
        re.compile(r"\bsk-(?=[\w-]{0,80}\d)[\w-]{20,}|\bxox[abeprs]-[\w-]{10,}|\beyJ[\w-]{8,}\.[\w.-]+"),
        HIDDEN,
    ),
    # and of Databricks, Google, npm, PyPI, Docker, NVIDIA, Vault, Grafana, DigitalOcean, Stripe, SendGrid, Groq
    (
        re.compile(r"\bdapi[0-9a-f]{32}(?:-\d+)?\b|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}"),
        HIDDEN,
    ),
    (
        re.compile(
            r"\bnpm_[A-Za-z0-9]{36}\b|\bpypi-[\w-]{16,}|\bdckr_[a-z]{3}_[\w-]{20,}|\bnvapi-[\w-]{20,}"
        ),
        HIDDEN,
    ),
    (re.compile(r"\bhv[sb]\.[\w-]{20,}|\bgl(?:sa|c)_[\w+/=-]{20,}|\bdo[opr]_v1_[0-9a-f]{64}\b"), HIDDEN),
    (
        re.compile(
            r"\b[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bgsk_[A-Za-z0-9]{32,}"
        ),
        HIDDEN,
    ),
    # all cookies of a header, each with its name
    (
        re.compile(r"""(?i)(\b(?:set-)?cookie["']?[ \t]*:[ \t]*["']?)(?=[\w.-]{1,100}=)[^\r\n"'<>]+"""),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)[^-]+"), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"""(?i)(authorization["']?[ \t]*[:=][ \t]*["']?)(?:(?:bearer|basic|token)[ \t]+)?[^\s"',}]+"""
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(\bbearer[ \t]+)(?=[\w.~+/-]{0,80}\d)[\w.~+/-]{8,}=*"), rf"\1{HIDDEN}"),
)
_OPTION = re.compile(
    rf"""(?<!\S)(--?(?:[\w-]{{0,40}}[_-])?(?i:token|secret|password|passwd|{_KEYS})[ \t]+)"""
    r"""(?!-|(?:or|and|to|is|with|for|in|of)\b)[^\s"']+"""
)
_CHAINED = re.compile(r"::(?=[A-Za-z][\w+.-]*://)")


def without_credentials(uri: str) -> str:
    """Return the URI without user, password and query. The rest identifies the text and is safe to show.

    A `?` may occur in file names and in globs. In a store's URI, only `?name=...` counts as a query.
    """
    return "::".join(map(_bare, _CHAINED.split(uri)))


def _bare(uri: str) -> str:
    protocol = uri.partition("://")[0].lower()
    if protocol in (uri.lower(), "file", "local"):
        return uri
    uri = _USER_OF_HTTP.sub(r"\1", _PASSWORD_IN_URI.sub("", uri)).replace("://@", "://", 1)
    return re.sub(r"[?#].*" if protocol in ("http", "https") else r"\?[\w.-]+=.*", "", uri)


def bare_places(value: Any) -> Any:
    """Return a document in which every URI is `without_credentials`."""
    if isinstance(value, dict):
        return {key: bare_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bare_places(item) for item in value]
    is_uri = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w+.:*/-]*://\S+", value)
    return without_credentials(value) if is_uri else value


def holds_secret(text: str) -> bool:
    """Return whether `redact` would hide a part of the text."""
    return redact(text) != text


def redact(value: T) -> T:
    """Return the same text, mapping or list with secrets replaced by ***.

    Hidden are the password of `scheme://user:password@host`, secret query parameters, webhook addresses, keys and
    tokens of a known form, and the value after a name such as token, secret, password, credential or key.
    """
    return _redact(value)


def redact_message(text: str) -> str:
    """Like `redact`, for a line to the user, in which text after a name and a colon is an explanation and not a
    value.
    """
    return _SET.sub(_hide_assigned, _by_form(text))


def hidden_at(value: Any) -> str:
    """Return the key of the first secret in a document, joined by dots; empty without one."""
    return _difference(value, redact(value), "")


def _difference(before: Any, after: Any, where: str) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys: list[Any] = list(before)
    elif isinstance(before, list) and isinstance(after, list):
        keys = list(range(len(before)))
    else:
        return where if before != after else ""
    result = (_difference(before[key], after[key], f"{where}.{key}".lstrip(".")) for key in keys)
    return next((path for path in result if path), "")


def connection_problem(error: BaseException) -> str:
    """Return why a server was not reached, as one line without secrets: the network's error if it is the cause, else
    the error.
    """
    cause: BaseException | None = error
    while cause is not None:
        # errors of the libraries themselves have no number
        if isinstance(cause, OSError) and cause.strerror:
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
    if not isinstance(key, str) or not value or isinstance(value, bool):
        return False
    if isinstance(value, int):
        return bool(_PASSWORD.search(key))
    return isinstance(value, str) and bool(_SECRET_KEY.search(key)) and not _is_variable(key, value)


def _is_variable(key: str, value: str) -> bool:
    """Return whether a webhook is given by the name of a variable. For a password this cannot be distinguished."""
    return "webhook" in key and bool(_VARIABLE.fullmatch(value))


def _text(text: str) -> str:
    return _ASSIGNED.sub(_hide_assigned, _OPTION.sub(rf"\1{HIDDEN}", _by_form(text)))


def _by_form(text: str) -> str:
    for form, shown in _BY_FORM:
        text = form.sub(shown, text)
    return text


def _hide_assigned(match: re.Match[str]) -> str:
    key = match["key"]
    value = match["value"]
    bare = value.strip("\"'")
    is_number = re.fullmatch(r"[-+.\d]+", bare) and not _PASSWORD.search(key)
    if is_number or bare in ("null", "true", "false") or bare.startswith(HIDDEN) or _is_variable(key, bare):
        return match[0]
    quote = value[0] if value[0] in "\"'" and value[0] == value[-1] else ""
    return f"{key}{quote}{HIDDEN}{quote}"
