"""Counts of the house, for whoever changes its structure: `python tests/house_counts.py`.

They are no targets. A number that grows asks for a look at what made it grow.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "workloads", "cluster")
JOB, RESOLVED = "JobSpec", "ResolvedJob"
MODEL_KINDS = {
    *("TransformerConfig", "HuggingFaceModel", "OwnModel"),
    *("TransformerWorkload", "HuggingFaceWorkload", "OwnWorkload"),
}
"""Classes of models that code outside `workloads` had better not tell apart: the `Workload` protocol answers."""


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A source file, read once for all counts."""

    name: str
    text: str
    functions: list[Function]
    """Every function and method."""
    calls: list[ast.Call]
    imports: int
    """Imports at the top of the file."""


def sources(root: Path = ROOT) -> Iterator[Source]:
    """Every source file."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text)
            nodes = list(ast.walk(tree))
            functions = [node for node in nodes if isinstance(node, Function)]
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            imports = sum(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
            yield Source(path.relative_to(root).as_posix(), text, functions, calls, imports)


def takes_job(function: Function, job: str = JOB) -> bool:
    """Whether a function is given a whole job: as it is written, or RESOLVED."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(each.annotation and job in ast.unparse(each.annotation) for each in arguments)


def tells_models_apart(call: ast.Call) -> bool:
    """Whether a call is an `isinstance` test for a kind of model."""
    return (
        isinstance(call.func, ast.Name)
        and call.func.id == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in MODEL_KINDS for part in ast.walk(call.args[1]))
    )


def counts(root: Path = ROOT) -> dict[str, float]:
    """Every count, by what it counts."""
    files = list(sources(root))
    functions = [each for file in files for each in file.functions]
    lengths = [file.text.count("\n") for file in files]
    bodies = [(each.end_lineno or each.lineno) - each.lineno + 1 for each in functions]
    comments = sum(line.lstrip().startswith("#") for file in files for line in file.text.splitlines())
    return {
        "source files": len(files),
        "lines": sum(lengths),
        "median lines of a file": median(lengths),
        "functions": len(bodies),
        "mean lines of a function": round(sum(bodies) / len(bodies), 1),
        "lines of comment in 1,000": round(1000 * comments / sum(lengths), 1),
        "functions that take the whole job": sum(takes_job(each) for each in functions),
        "functions that take the resolved job": sum(takes_job(each, RESOLVED) for each in functions),
        "isinstance tests of kinds of models": sum(
            tells_models_apart(call)
            for file in files
            if not file.name.startswith("workloads/")
            for call in file.calls
        ),
        "calls with more than five positional arguments": sum(
            len(call.args) > 5 for file in files for call in file.calls
        ),
        "modules with more than 25 imports": sum(file.imports > 25 for file in files),
        "files that name the optimizer lion": sum('"lion"' in file.text for file in files),
        "files that name the sink wandb": sum(bool(re.search(r"\bwandb\b", file.text)) for file in files),
    }


if __name__ == "__main__":
    for what, count in counts(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        print(f"{count:>10,}  {what}")
