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

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "workloads", "cluster")
JOB, RESOLVED = "JobSpec", "ResolvedJob"
MODEL_KINDS = {
    *("TransformerConfig", "HuggingFaceModel", "OwnModel"),
    *("TransformerWorkload", "HuggingFaceWorkload", "OwnWorkload"),
}
"""Classes of models that code outside `workloads` had better not tell apart: the `Workload` protocol answers."""


def sources(root: Path = ROOT) -> Iterator[tuple[str, str, ast.Module]]:
    """Name, text and tree of every source file."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            yield path.relative_to(root).as_posix(), text, ast.parse(text)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def takes_job(function: ast.FunctionDef | ast.AsyncFunctionDef, job: str = JOB) -> bool:
    """Whether a function is given a whole job: as it is written, or RESOLVED."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(each.annotation and job in ast.unparse(each.annotation) for each in arguments)


def tells_models_apart(tree: ast.Module) -> int:
    """How many `isinstance` tests of a file ask for a kind of model."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in MODEL_KINDS for part in ast.walk(node.args[1]))
        for node in ast.walk(tree)
    )


def positional_calls(tree: ast.Module, most: int = 5) -> int:
    """How many calls of a file have more than `most` positional arguments."""
    return sum(isinstance(node, ast.Call) and len(node.args) > most for node in ast.walk(tree))


def counts(root: Path = ROOT) -> dict[str, float]:
    """Every count, by what it counts."""
    files = list(sources(root))
    lengths = [text.count("\n") for _, text, _ in files]
    bodies = [
        (each.end_lineno or each.lineno) - each.lineno + 1 for _, _, tree in files for each in functions(tree)
    ]
    comments = sum(bool(re.match(r"\s*#", line)) for _, text, _ in files for line in text.splitlines())
    imports = [
        sum(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) for _, _, tree in files
    ]
    return {
        "source files": len(files),
        "lines": sum(lengths),
        "median lines of a file": median(lengths),
        "functions": len(bodies),
        "mean lines of a function": round(sum(bodies) / len(bodies), 1),
        "lines of comment in 1,000": round(1000 * comments / sum(lengths), 1),
        "functions that take the whole job": sum(
            takes_job(each) for _, _, tree in files for each in functions(tree)
        ),
        "functions that take the resolved job": sum(
            takes_job(each, RESOLVED) for _, _, tree in files for each in functions(tree)
        ),
        "isinstance tests of kinds of models": sum(
            tells_models_apart(tree) for name, _, tree in files if not name.startswith("workloads/")
        ),
        "calls with more than five positional arguments": sum(positional_calls(tree) for _, _, tree in files),
        "modules with more than 25 imports": sum(each > 25 for each in imports),
        "files that name the optimizer lion": sum('"lion"' in text for _, text, _ in files),
        "files that name the sink wandb": sum(bool(re.search(r"\bwandb\b", text)) for _, text, _ in files),
    }


if __name__ == "__main__":
    for what, count in counts(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        print(f"{count:>10,}  {what}")
