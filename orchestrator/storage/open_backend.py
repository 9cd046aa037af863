"""Choose the storage backend of a URI."""

from __future__ import annotations

from orchestrator.storage.backend import Backend
from orchestrator.storage.uri import is_local, local_path


def open_backend(uri: str, timeout: float) -> Backend:
    """Return the backend for a path or an fsspec URI. Credentials and endpoints come from fsspec's own configuration
    and the environment.

    Args:
        uri: the folder below which all paths of the backend are.
        timeout: seconds that a small call to a remote store may take; see `RemoteFileSystem`.

    Raises:
        ValueError: fsspec does not know the protocol.
        ImportError: the package that serves the protocol is not installed.
    """
    # Imported late, because the process that writes commits starts faster without fsspec.
    if is_local(uri):
        from orchestrator.storage.posix_backend import PosixBackend

        return PosixBackend(local_path(uri))
    from orchestrator.storage.object_backend import ObjectBackend

    return ObjectBackend(uri, timeout)
