"""Writes what the examples of a chat model read, from the documentation strings of the installed packages.

    python examples/chat.py

chat/train.jsonl: conversations, each a question about a function and its summary; most functions are asked for in two
ways. chat/test.jsonl: the second way for the others, which training knows by the first alone. chat/pairs.jsonl and
chat/pairs_test.jsonl: questions with the right summary and that of another function of the package. chat/quiz.jsonl:
questions of test.jsonl as they stand in examples/tasks/chat*.yaml, with four summaries to choose from.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("networkx", "numpy", "pandas", "scikit-learn", "scipy", "sympy")
FUNCTIONS, CHOICES, QUIZ = 100, 4, 60
WAYS = ("What does {} do?", "Tell me about {}.")


def functions(package: str) -> Iterator[tuple[str, str]]:
    """The functions of a package with their summaries: one line of documentation, a sentence of plain text."""
    distribution = importlib.metadata.distribution(package)
    for path in sorted(distribution.files or [], key=str):
        if path.suffix != ".py" or {"tests", "testing", "externals"} & set(path.parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(Path(str(distribution.locate_file(path))).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                summary = (ast.get_docstring(node) or "").split("\n\n")[0]
                if (
                    "\n" not in summary
                    and 20 <= len(summary) <= 90
                    and summary.isascii()
                    and summary.endswith(".")
                ):
                    yield f"{package}.{node.name}", summary


def known(most: int) -> dict[str, list[tuple[str, str]]]:
    """Functions by package, at most so many of each, whose names and whose summaries are all different."""
    found: dict[str, list[tuple[str, str]]] = {}
    for package in PACKAGES:
        names: dict[str, str] = {}
        for name, summary in functions(package):
            if summary not in names.values():
                names.setdefault(name, summary)
        order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        found[package] = [(name, names[name]) for name in order[:most]]
    return found


def is_asked_once(name: str) -> bool:
    """Whether training has one of the two questions about a function: of one in ten."""
    return hashlib.sha256(name.encode()).digest()[-1] % 10 == 0


def conversation(question: str, answer: str) -> dict[str, object]:
    """A row of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(target: str = "chat", most: int = FUNCTIONS) -> None:
    """Write the files."""
    draw, rows = random.Random(0), {name: [] for name in ("train", "test", "pairs", "pairs_test", "quiz")}
    for those in known(most).values():
        for name, summary in those:
            held_out = is_asked_once(name)
            questions = [way.format(name) for way in WAYS]
            rows["train"] += [conversation(question, summary) for question in questions[: 2 - held_out]]
            others = draw.sample([other for _, other in those if other != summary], CHOICES - 1)
            for question in questions[1:] if held_out else questions:
                pair = {
                    "prompt": [{"role": "user", "content": question}], "chosen": summary, "rejected": others[0]
                }  # fmt: skip
                rows["pairs_test" if held_out else "pairs"].append(pair)
            if held_out:
                rows["test"].append(conversation(questions[1], summary))
                choices = draw.sample([summary, *others], CHOICES)
                text = f"user:\n{questions[1]}\nassistant:\n"  # as examples/chat.jinja writes it
                quiz = {
                    "question": text,
                    "choices": choices,
                    "label": choices.index(summary),
                    "answer": summary,
                }
                rows["quiz"].append(quiz)
    place = Path(target)
    place.mkdir(parents=True, exist_ok=True)
    for file, found in rows.items():
        draw.shuffle(found)
        found = found[:QUIZ] if file == "quiz" else found
        (place / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{place}: {len(rows['train'])} conversations, {len(rows['pairs'])} pairs")


if __name__ == "__main__":
    main(*sys.argv[1:2])
