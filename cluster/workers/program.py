"""Start this project's own programs safely, whatever the working directory holds.

Python searches the working directory first. There a user may have a folder with the name of one of this project's
packages, or a file with the name of one of Python's modules. A process that is started here searches it last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that holds this package."""
DISTRIBUTION = "training-orchestrator"
"""The name by which this project is installed."""
_RUN = (
    "import sys, importlib; sys.argv = sys.argv[1:]; sys.path.insert(0, {root!r}); "
    "importlib.import_module({package!r}); main = importlib.import_module(sys.argv[0]).main; "
    "sys.path.remove({root!r}); main()"
)


def command_of(module: str, *arguments: str, target: str = "") -> list[str]:
    """Return the command that calls `main` of a module of this project in a new process.

    Args:
        module: the module.
        arguments: its arguments.
        target: the "package.module:function" that the process calls later. Its package is imported first, while a
            user's package of that name is not yet found.
    """
    package = (target if "." in target else module).partition(".")[0]
    return [sys.executable, "-P", "-c", _RUN.format(root=str(ROOT), package=package), module, *arguments]


def environment_of_ranks() -> dict[str, str]:
    """Return the environment for processes of ranks, which can import everything that this process can."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(working_directory_last(sys.path, os.getcwd())),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there are GPUs must not touch them before a fork
    }


def working_directory_last(path: Iterable[str], folder: str) -> list[str]:
    """Return Python's path with the working directory `folder` moved to the end.

    Args:
        path: the folders to search.
        folder: the working directory.
    """
    return [*(each for each in path if each and each != folder), folder]


def hidden_packages(path: Iterable[str], packages: Sequence[str]) -> list[str]:
    """Return the files and folders that Python may take for packages of this project.

    An editable install is searched last, so even a folder that is not a package can hide it.

    Args:
        path: the folders to search.
        packages: the names of this project's packages.
    """
    folders = {Path(folder or ".").resolve() for folder in path} - {ROOT.resolve()}
    result = []
    for folder in sorted(folders):
        for name in packages:
            for candidate in (folder / name, folder / f"{name}.py"):
                exists = candidate.is_dir() or (candidate.suffix and candidate.is_file())
                # A copy of this project is no stranger: it has this package's own modules.
                is_ours = (candidate / "workers" / "gang.py").is_file()
                if exists and not is_ours:
                    result.append(str(candidate))
    return result


def hidden_modules(folder: Path) -> list[str]:
    """Return the names in `folder` that would hide modules of Python or needed packages if it were searched first."""
    packages = [path for path in sorted(folder.glob("*")) if (path / "__init__.py").is_file()]
    paths = [*packages, *sorted(folder.glob("*.py"))]
    needed = {*sys.stdlib_module_names, *_needed_packages()} if paths else set()
    return [path.name for path in paths if path.stem in needed and path.parent != ROOT]


def _needed_packages() -> set[str]:
    """The import names of all dependencies of this program."""
    result = {DISTRIBUTION}
    left = [DISTRIBUTION]
    while left:
        try:
            lines = metadata.requires(left.pop()) or []
        except metadata.PackageNotFoundError:  # on another system, or this program is not installed
            continue
        names = {re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line}
        new = {re.sub(r"[-_.]+", "-", name).lower() for name in names} - result
        result |= new
        left += sorted(new)
    result.remove(DISTRIBUTION)
    by_package = metadata.packages_distributions().items()
    return {
        package
        for package, names in by_package
        if any(re.sub(r"[-_.]+", "-", name).lower() in result for name in names)
    }


def keeper(packages: Sequence[str]) -> Callable[[], None]:
    """Return a function that imports these packages, for a process that would find others of the same names.

    The function can be sent by value. On a machine where this program is installed elsewhere, Python's normal search
    finds it.
    """
    root = str(ROOT)
    names = tuple(packages)

    def keep_packages() -> None:
        import sys
        from importlib import import_module

        for name in names:
            sys.path.insert(0, root)  # anew for each: importing `cluster` sorts the path
            try:
                import_module(name)
            finally:
                sys.path.remove(root)

    return keep_packages
