"""The user's modules as files that lie side by side and import each other relatively.

transformers runs code from a model's folder only in this form (`trust_remote_code`): it copies single files, and
follows relative imports alone. Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workloads.errors import WorkloadError
from workloads.own.object_reference import PACKAGES, is_built_in, sources

SUFFIX = ".py"


@dataclass(frozen=True)
class FlatCode:
    """The code behind `module:name`.

    Attributes:
        files: the text of each file by its name without `.py`.
        module: the file that has the object.
        needs: packages of this project that the code imports, which a reader must have installed.
    """

    files: Mapping[str, str]
    module: str
    needs: tuple[str, ...]


def flat_code(reference: str) -> FlatCode:
    """Return the module of `reference` and all modules that `code_hash` covers, with relative imports.

    Imports below `if TYPE_CHECKING:` are left out: transformers would ask for their packages.

    Raises:
        WorkloadError: part of the code cannot travel. One line says which.
    """
    if is_built_in(reference):
        raise WorkloadError(f"{reference} is code of this project, which an export does not carry")
    path_by_module = sources(reference)
    names = {module: module.replace(".", "_") for module in path_by_module}
    if len(set(names.values())) < len(names):
        raise WorkloadError(f"two modules of {reference} get one file name; rename one of them")
    files, needs = {}, set[str]()
    for module, path in sorted(path_by_module.items()):
        if path.suffix != SUFFIX:
            raise WorkloadError(f"{module} is compiled and cannot travel with the model; write it in Python")
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        moved = _Moved(module, package, names, path.read_text(encoding="utf-8"))
        files[names[module]] = moved.text()
        needs |= moved.needs
    return FlatCode(files, names[reference.partition(":")[0]], tuple(sorted(needs)))


class _Moved:
    """One module, with the imports that it has beside the others."""

    def __init__(self, module: str, package: str, names: Mapping[str, str], text: str) -> None:
        self._module = module
        self._package = package
        self._names = names
        self._lines = text.encode().splitlines(keepends=True)
        self._tree = ast.parse(text)
        self.needs = set[str]()

    def text(self) -> str:
        """Return the new text. Raises WorkloadError for an import that has no relative form."""
        edits = sorted(self._edits(self._tree), key=lambda edit: (edit[0].lineno, edit[0].col_offset))
        for first, last, new in reversed(edits):
            self._replace(first, last, new)
        return b"".join(self._lines).decode()

    def _edits(self, node: ast.AST) -> Iterator[tuple[ast.stmt, ast.stmt, str]]:
        """Yield first and last statement of what is replaced, and the new text."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield child.body[0], child.body[-1], "pass"
                for other in child.orelse:
                    yield from self._edits(other)
            elif isinstance(child, ast.Import):
                if any(self._is_own(alias.name) for alias in child.names):
                    yield child, child, "; ".join(map(self._imported, child.names))
                self._note(*(alias.name for alias in child.names))
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                if self._is_own(base):
                    yield child, child, "; ".join(self._from(base, alias) for alias in child.names)
                self._note(base)
            else:
                yield from self._edits(child)

    def _base(self, node: ast.ImportFrom) -> str:
        above = self._package.split(".")[: self._package.count(".") + 2 - node.level] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    def _is_own(self, name: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for module in self._names)

    def _note(self, *names: str) -> None:
        tops = {name.partition(".")[0] for name in names if not self._is_own(name)}
        self.needs |= tops & set(PACKAGES)

    def _imported(self, alias: ast.alias) -> str:
        if not self._is_own(alias.name):
            return f"import {ast.unparse(alias)}"
        if alias.name not in self._names or ("." in alias.name and not alias.asname):
            parent, _, leaf = alias.name.rpartition(".")
            way = f"write `from {parent} import {leaf}`" if parent else "import the module that you use"
            raise WorkloadError(f"{self._module} has `import {alias.name}`, which cannot travel; {way}")
        return f"from . import {self._names[alias.name]} as {alias.asname or alias.name}"

    def _from(self, base: str, alias: ast.alias) -> str:
        name = f"{base}.{alias.name}"
        if name in self._names:
            return f"from . import {self._names[name]} as {alias.asname or alias.name}"
        if base not in self._names:
            raise WorkloadError(f"{self._module} imports {name}, which has no file; it cannot travel")
        return f"from .{self._names[base]} import {ast.unparse(alias)}"

    def _replace(self, first: ast.stmt, last: ast.stmt, new: str) -> None:
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        begin, end = first.lineno - 1, last.end_lineno - 1
        before = self._lines[begin][: first.col_offset]
        after = self._lines[end][last.end_col_offset :]
        self._lines[begin : end + 1] = [before + new.encode() + after]
