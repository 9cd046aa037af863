"""What can be the name of a place at all: found wrong before anything is asked of it."""

from __future__ import annotations

import errno
import os
from urllib.parse import urlsplit

from orchestrator.job.errors import InputError
from orchestrator.storage.backends import is_local, local_path

NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}
"""What a file system says of a name that nothing can have."""


def check_place(uri: str, where: str = "") -> None:
    """Refuse a path or URI that is empty, too long, of no known protocol, or that goes round in a circle of links.

    Raises InputError, with `where` it was given.
    """
    if why := _wrong(uri):
        shown = uri.encode(errors="backslashreplace").decode()[:200]
        what = f"{shown!r} names no place ({why})"
        raise InputError(what, where, "use a path or an fsspec URI such as s3://")


def _wrong(uri: str) -> str:
    if not uri.split("://", 1)[-1].strip():
        return "it is empty"
    try:
        if is_local(uri):
            os.stat(local_path(uri))
            return ""
        protocol, rest = urlsplit(uri.split("::")[-1]).scheme, uri.split("://", 1)[-1]
        if not rest.strip("/"):
            return "it is empty"
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in NO_NAME else ""
    except (ValueError, ImportError) as error:
        return " ".join(str(error).split())
    return ""


def is_path(uri: str) -> bool:
    """Whether it is written as a path of this machine, and not as a URI."""
    return is_local(uri) and "://" not in uri
