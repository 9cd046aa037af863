"""Properties of a path or URI without access to storage: whether it is valid, whether it is local, and its path."""

from __future__ import annotations

import errno
import os
from importlib.util import find_spec
from typing import NamedTuple

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install

INVALID_NAME = {errno.ENAMETOOLONG, errno.ELOOP}
"""File system errors for a path that cannot exist."""


class Library(NamedTuple):
    """The library for a store, and the extra that installs it."""

    library: str
    extra: str


LIBRARIES = {
    **dict.fromkeys(("gs", "gcs"), Library("gcsfs", "gcs")),
    **dict.fromkeys(("az", "abfs", "abfss"), Library("adlfs", "azure")),
}
"""Libraries by URI protocol. The one for s3:// is always installed."""


def protocol_of(uri: str) -> str:
    """Return the protocol of a URI; for a chained URI that of its last part; empty for a path."""
    head, mark, _ = uri.split("::")[-1].partition("://")
    return head.lower() if mark else ""


def is_local(uri: str) -> bool:
    """Return whether `uri` names a path on this machine's file systems: a plain path, file:// or local://.

    A chain of file systems (`simplecache::s3://...`) contains ://. Without it, a name with :: is a path.
    """
    return "://" not in uri or ("::" not in uri and uri.startswith(("file://", "local://")))


def local_path(uri: str) -> str:
    """Return the absolute path of a local URI."""
    return os.path.abspath(os.path.expanduser(uri.split("://", 1)[-1]))


def check_uri(uri: str, where: str = "") -> None:
    """Check that a path or URI is not empty, not too long, not a loop of symbolic links, and of a known protocol.

    Remote stores are not contacted. Raises InputError; `where` says where the URI was given.
    """
    shown = uri.encode(errors="backslashreplace").decode()[:200]
    store = LIBRARIES.get(protocol_of(uri))
    if store and find_spec(store.library) is None:
        problem_text = f"{shown!r} needs {store.library}, which is not installed"
        raise InputError(problem_text, where, install(store.extra))
    if problem := _problem(uri):
        problem_text = f"{shown!r} is not a path or URI ({problem})"
        raise InputError(problem_text, where, "use a path or an fsspec URI such as s3://")


def _problem(uri: str) -> str:
    if not uri.split("://", 1)[-1].strip():
        return "it is empty"
    try:
        if is_local(uri):
            os.stat(local_path(uri))
            return ""
        protocol = protocol_of(uri)
        rest = uri.split("://", 1)[-1]
        if not rest.strip("/"):
            return "it is empty"
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in INVALID_NAME else ""
    except (ValueError, ImportError) as error:
        return " ".join(str(error).split())
    return ""


def unwritable(uri: str) -> str:
    """Return why a local path cannot be created or written; empty if it can. Remote stores are not contacted."""
    if not is_local(uri):
        return ""
    folder = local_path(uri)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return os.strerror(errno.ENOTDIR)
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def is_path(uri: str) -> bool:
    """Return whether `uri` is written as a local path, without a protocol."""
    return is_local(uri) and "://" not in uri
