"""Resolve `module:name`, and hash the code behind it. Standard library only.

Modules are found as Python finds them, and after that in the working directory, so commands need no PYTHONPATH.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError

PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
NOT_OWN = ("hf:", "ext:")
"""Prefixes with a special meaning: a model folder, and an entry point of an installed package."""
HOME = Path(__file__).resolve().parents[2]
"""The folder that holds this project's packages."""
PACKAGES = ("orchestrator", "workloads", "cluster")
MOVED = "training_orchestrator.moved"
"""The group of entry points that say where an object of this project is now: its old `module:name`, and the new one."""
INSTALLED = ("site-packages", "dist-packages")


class CannotImport(WorkloadError):
    """The module of a reference raises an error when it is imported."""


def is_object_reference(name: str) -> bool:
    """Return whether a name in a job file refers to the user's own code."""
    return not name.startswith(NOT_OWN) and re.match(PATTERN, name) is not None


def load(reference: str) -> Any:
    """Import and return the object that `module:name` names. Raises WorkloadError if that fails."""
    if is_built_in(reference):
        return _found(present_name(reference))
    module = reference.partition(":")[0]
    root = _root(module)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    top = module.partition(".")[0]
    if (
        top in PACKAGES and root != HOME
    ):  # a user's folder may have the name of one of our packages: both are found
        path = importlib.import_module(top).__path__
        if str(root / top) not in path:
            path.append(str(root / top))
    return _found(reference)


def is_built_in(reference: str) -> bool:
    """Return whether `module:name` is a module of this program, whose code is not part of a run's identity."""
    module = present_name(reference).partition(":")[0]
    return module.partition(".")[0] in PACKAGES and _file(HOME, module) is not None


def present_name(reference: str) -> str:
    """Return where an object of this project is now. Job files and run directories may have its old name."""
    module = reference.partition(":")[0]
    if module.partition(".")[0] not in PACKAGES or _file(HOME, module) is not None:
        return reference
    return next((point.value for point in entry_points(group=MOVED, name=reference)), reference)


def _found(reference: str) -> Any:
    module, _, name = reference.partition(":")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a script may end the process
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CannotImport(f"{reference} cannot be imported ({reason}); fix it") from None
    if not hasattr(imported, name):
        raise WorkloadError(f"{module} has no {name}; name something in {imported.__file__}")
    return getattr(imported, name)


def call(reference: str, made: Any, options: dict[str, Any]) -> Any:
    """Return `made(**options)`.

    Args:
        reference: the object as module:name, for messages.
        made: the class or function.
        options: its keyword arguments.

    Raises:
        WorkloadError: the call fails.
    """
    try:
        return made(**options)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise WorkloadError(f"{reference} cannot be made with its options ({reason}); fix it") from None


def code_hash(reference: str) -> str:
    """Return a hash of the module, and of all modules that it imports from the same working directory.

    The hash covers their contents and their names in the directory. If the module belongs to an installed package,
    only imports within that package are followed. Imports are found in the source, within functions too; computed
    imports are not found. Raises WorkloadError if there is no source.
    """
    root = _root(reference.partition(":")[0])
    digest = blake2b(digest_size=16)
    for name, path in sorted(sources(reference).items()):
        content = path.read_bytes()
        digest.update(f"{name} {path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def check_outside(reference: str, folder: str | Path) -> None:
    """Check that the code of an object is not in a folder, so that a stored folder cannot bring the code that reads it.

    Args:
        reference: the object as module:name.
        folder: the stored folder.

    Raises:
        WorkloadError: the code is in `folder`.
    """
    if is_built_in(reference):
        return
    stored_folder = Path(folder).resolve()
    if any(path.resolve().is_relative_to(stored_folder) for path in sources(reference).values()):
        raise WorkloadError(
            f"{reference} would run code of this folder; run the command where your own copy of the code is"
        )


def sources(reference: str) -> dict[str, Path]:
    """Return the files that `code_hash` covers, by module name. Raises WorkloadError."""
    module = reference.partition(":")[0]
    root, top = _root(module), module.partition(".")[0]
    installed = any(part in INSTALLED for part in root.parts)
    path_by_module: dict[str, Path] = {}
    left = [module]
    while left:
        parts = left.pop().split(".")
        if (parts[0] != top and installed) or (root == HOME and parts[0] in PACKAGES):
            continue
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            path = _file(root, name)
            if path is not None and name not in path_by_module:
                path_by_module[name] = path
                left += _imports(name, path)
    if module not in path_by_module or path_by_module[module].suffix != ".py":
        raise WorkloadError(f"{reference} has no source code in {root}; write it in Python")
    return path_by_module


def root_of(reference: str) -> Path:
    """Return the folder that contains the reference's top package, or the module itself. Raises WorkloadError."""
    return _root(reference.partition(":")[0])


def _root(module: str) -> Path:
    """Return the folder that contains the module's top package, or the module itself. Raises WorkloadError."""
    top, here = module.partition(".")[0], Path.cwd()
    path = [folder or str(here) for folder in sys.path]
    if top in PACKAGES:  # those of this project are known, so that it must be the user's that is meant
        path = [folder for folder in path if Path(folder).resolve() != HOME]
    root = _folder(PathFinder.find_spec(top, [*path, str(here)]))
    if root is None and top not in PACKAGES:
        try:
            root = _folder(find_spec(top))  # for an editable install
        except (ImportError, ValueError):
            root = None
    if root is None:
        raise WorkloadError(
            f"there is no module {module} in {here} or on Python's path; name one that is there"
        )
    beside = _file(here, top)
    if beside is not None and root != here.resolve():
        raise WorkloadError(f"{top} in {root} hides {beside}; rename yours")
    return root


def _folder(spec: Any) -> Path | None:
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        file = Path(spec.origin).resolve()
        return file.parent.parent if file.name == "__init__.py" else file.parent
    locations: Sequence[str] = list(spec.submodule_search_locations or ())
    return Path(locations[0]).resolve().parent if locations else None


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    compiled = (base.with_name(f"{base.name}{suffix}") for suffix in EXTENSION_SUFFIXES)
    for path in (base / "__init__.py", base.with_name(f"{base.name}.py"), *compiled):
        if path.is_file():
            return path
    return None


def _imports(module: str, path: Path) -> Iterator[str]:
    """Return the names that a module imports, each also as a possible module name. Empty for a compiled module."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise WorkloadError(f"{path} is not Python ({error}); fix it") from None
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (
                imported for imported in (base, *(f"{base}.{alias.name}" for alias in node.names)) if imported
            )
