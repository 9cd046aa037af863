"""A corpus that every installation has: the docstrings of the installed packages.

They are read by parsing the sources, so that no package is imported. Equal versions of the packages and of Python give
equal bytes. There is one .txt file per package; a line with only `<|endoftext|>` separates documents.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import platform
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.sources.text_rows import SEPARATOR
from orchestrator.storage.atomic import replace_folder

FORMAT = 1

PACKAGES = (
    "deepspeed",
    "huggingface_hub",
    "matplotlib",
    "mlflow",
    "networkx",
    "numpy",
    "pandas",
    "ray",
    "scikit-learn",
    "scipy",
    "sqlalchemy",
    "sympy",
    "torch",
    "transformers",
)
"""Direct and indirect dependencies of this project whose docstrings contain much prose."""

PACKAGE_BYTES = 2**20
"""Maximum bytes of each package, so that none dominates."""

SHORTEST = 200
"""Shorter docstrings are labels rather than prose."""

_NOT_PROSE = frozenset({"tests", "test", "testing", "_vendor", "vendor", "third_party", "thirdparty_files"})


def collect(folder: str, limit_mib: float | None = None) -> dict[str, Any]:
    """Write the corpus to the local `folder`, at most `limit_mib` MiB in all, unless it is there already.

    Returns the content of corpus.json beside the texts: the versions and, for each file, bytes, documents and checksum.
    Raises InputError if the folder holds something else or cannot be written.
    """
    target = Path(folder)
    versions = _versions()
    wanted = {"format": FORMAT, "limit_mib": limit_mib, "versions": versions}
    existing = _existing(target)
    if existing and {key: existing.get(key) for key in wanted} == wanted:
        return existing
    share = PACKAGE_BYTES
    if limit_mib is not None:
        share = min(share, int(limit_mib * 2**20 / len(versions)))
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        draft.mkdir(parents=True)
        written_texts: set[str] = set()
        files = {
            f"{name}.txt": _write(draft / f"{name}.txt", name, share, written_texts) for name in versions
        }
        summary = {**wanted, "bytes": sum(f["bytes"] for f in files.values()), "files": files}
        (draft / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
        replace_folder(str(draft), str(target), _is_ours)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", folder, "name another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return summary


def _versions() -> dict[str, str]:
    """Version of Python and of each package that is installed; a build's own suffix (+cpu) does not count."""
    result = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def _existing(target: Path) -> dict[str, Any] | None:
    """The content of corpus.json in a folder; None if there is no corpus or it is incomplete."""
    if not target.exists():
        return None
    try:
        summary = json.loads((target / "corpus.json").read_text())
        sizes = {name: file["bytes"] for name, file in summary["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if target.is_dir() and not any(target.iterdir()):
            return None
        raise InputError("holds something other than a corpus", str(target), "name another folder") from None
    is_complete = all(
        (target / n).is_file() and (target / n).stat().st_size == size for n, size in sizes.items()
    )
    return summary if is_complete else None


def _is_ours(name: str) -> bool:
    return name == "corpus.json" or name.removesuffix(".txt") in ("python", *PACKAGES)


def _write(path: Path, name: str, limit: int, written_texts: set[str]) -> dict[str, Any]:
    """Write one package's documents that are not in `written_texts`, up to `limit` bytes, and add them to it."""
    separator = b"\n" + SEPARATOR + b"\n"
    documents: list[bytes] = []
    size = 0
    for text in _topics() if name == "python" else _docstrings(name):
        data = text.encode() + separator
        if not _is_prose(text) or text in written_texts:
            continue
        if size + len(data) > limit:
            break
        written_texts.add(text)
        documents.append(data)
        size += len(data)
    content = b"".join(documents)
    path.write_bytes(content)
    return {"bytes": size, "documents": len(documents), "xxh3": xxhash.xxh3_128_hexdigest(content)}


def _topics() -> Iterator[str]:
    """Python's own help topics, by name."""
    for _, text in sorted(topics.items()):
        yield text.strip()


def _docstrings(package: str) -> Iterator[str]:
    """Documentation strings of a package, module by module, as `inspect.cleandoc` leaves them.

    Modules come in the order of a hash of their path: a limit then takes some of every corner of the package.
    """
    distribution = importlib.metadata.distribution(package)
    paths = [p for p in distribution.files or [] if p.suffix == ".py" and not _NOT_PROSE & set(p.parts)]
    for path in sorted(paths, key=lambda p: xxhash.xxh3_64_hexdigest(p.as_posix().encode())):
        try:
            source = Path(str(distribution.locate_file(path))).read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield (ast.get_docstring(node) or "").strip()


def _is_prose(text: str) -> bool:
    """Whether a text is long enough, nearly all ASCII, and contains no separator."""
    ascii_ = sum(map(str.isascii, text))
    return len(text) >= SHORTEST and ascii_ >= 0.98 * len(text) and SEPARATOR.decode() not in text
