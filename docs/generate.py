"""Pages and pictures of the site that are made at every build, from the code and from files of the repository.

mkdocs calls `on_files` and `on_page_markdown` (`hooks` in mkdocs.yml). Nothing made here is kept in the repository, so
none of it can be old.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
COPIED = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "guides/kubernetes.md": "infra/README.md",
    "guides/runbook.md": "infra/RUNBOOK.md",
}
"""Page and the file that it shows."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Draw the blocks of a page that are marked as `flow`; a file that is a page here is linked as that."""
    for page, file in COPIED.items():
        markdown = markdown.replace(f"](../../{file}", f"]({Path(page).name}")
    return FLOW.sub(lambda match: f"{svg(match[1])}\n\n", markdown)


def pages() -> dict[str, str]:
    """The Markdown of each generated page, by its path."""
    made = {"reference/job-file.md": job_file(), "reference/commands.md": commands()}
    return made | {page: (ROOT / file).read_text() for page, file in COPIED.items()}


def job_file() -> str:
    """Every key of the job file, from its JSON Schema."""
    from orchestrator.config.described import sections

    lines = ["# The job file", INTRODUCTION]
    for section in sections():
        lines += [
            f"\n## {section.path or 'Top level'}\n",
            *([f"{_prose(section.text)}\n"] if section.text else []),
        ]
        lines.append("| key | type | default | meaning |\n|---|---|---|---|")
        lines += [
            f"| `{key.name}` | {_prose(key.type)} | {_code(key.default)} | {_prose(key.meaning)} |"
            for key in section.keys
        ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """
YAML, or the same object in Python. Unknown keys are refused with the nearest known one; everything wrong is one line
with the place and what to do about it, before anything is written. `orchestrator schema` prints the JSON Schema for
your editor, `orchestrator schema train.optimizer` describes that key and those below it; `--set train.steps=50`
overrides any key. A key without a default is required. A file with `stages` holds several jobs, see
[Chains](../guides/chains.md).
"""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _prose(text: str) -> str:
    """A description as it may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Every command with its arguments and options, as `--help` says them."""
    import typer

    from orchestrator.cli.app import app

    root: Any = typer.main.get_command(app)
    lines = ["# Commands", EXITS]
    for words, command in _leaves("orchestrator", root):
        lines += ["", f"## {words}", "", _prose(command.help or ""), ""]
        parameters = [p for p in command.params if p.name != "help"]
        if parameters:
            lines += ["| | what it is | default |", "|---|---|---|"]
        for parameter in parameters:
            names = (
                ", ".join(f"`{name}`" for name in parameter.opts)
                if parameter.opts[0].startswith("-")
                else (f"`{parameter.name}`, an argument")
            )
            default = _command_default(parameter)
            lines.append(f"| {names} | {_prose(getattr(parameter, 'help', '') or '')} | {default} |")
    return "\n".join(lines) + "\n"


EXITS = """
Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 3 stopped by a limit or by you, with a commit in place, 130
interrupted before there was one to make, or while it followed what goes on without it.
`--json` prints one document on standard output; `--debug`, anywhere, adds the trace to an error.
"""


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Each command that does something, with the words that call it."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _leaves(f"{words} {name}", inner)
    else:
        yield words, command


def _command_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value is None or callable(value) or value in (False, [], ()) else _code(str(value))


FLOW = re.compile(r"^```flow\n(.*?)^```\n", re.M | re.S)
"""A picture as plain text: a line `name | what` begins a process, an indented `file | what` is a file that is passed in
it, and `> how` is the way to the next process."""
WIDTH, LINE, GAP, PAD = 860, 24, 46, 14
"""Sizes in SVG units: of the picture, of a line, between boxes, within a box."""


class Process:
    """A box of the picture: its `files` with what each does; `way` is how the next box is reached."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what, self.way = name, what, ""
        self.files: list[tuple[str, str]] = []


def flow(text: str) -> list[Process]:
    """The processes of a picture, from the top."""
    found: list[Process] = []
    for line in filter(str.strip, text.splitlines()):
        left, _, right = (part.strip() for part in line.partition("|"))
        if line.startswith(">"):
            found[-1].way = line[1:].strip()
        elif line.startswith(" "):
            found[-1].files.append((left, right))
        else:
            found.append(Process(left, right))
    return found


def svg(text: str) -> str:
    """The picture as one SVG element; colours follow the page's text colour, for light and dark."""
    parts, y = [], 4
    for process in flow(text):
        height = LINE * (1 + len(process.files)) + PAD
        parts.append(
            f'<rect x="2" y="{y}" width="{WIDTH - 4}" height="{height}" rx="8" fill="currentColor" '
            'fill-opacity=".05" stroke="currentColor" stroke-opacity=".35"/>'
        )
        parts.append(_line(y + LINE - 4, process.name, process.what, "700"))
        for number, (file, what) in enumerate(process.files, 2):
            parts.append(_line(y + LINE * number - 4, file, what, "400", "monospace", 18))
        y += height
        if process.way:
            parts.append(
                f'<path d="M40 {y} v{GAP - 10} m-5 -8 l5 8 l5 -8" fill="none" stroke="currentColor"/>'
            )
            parts.append(_text(56, y + GAP / 2 + 3, process.way, "400", "inherit", ".7"))
            y += GAP
    files = sum(len(process.files) for process in flow(text))
    label = escape(f"{len(flow(text))} processes, {files} files", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 4}" role="img" aria-label="{label}" style="display:block;max-width:{WIDTH}px" '
        f'font-size="13">\n' + "\n".join(parts) + "\n</svg>"
    )


def _line(y: float, left: str, right: str, weight: str, family: str = "inherit", indent: int = 0) -> str:
    return _text(16 + indent, y, left, weight, family) + _text(330, y, right, "400", "inherit", ".8")


def _text(x: float, y: float, text: str, weight: str, family: str, opacity: str = "1") -> str:
    return (
        f'<text x="{x}" y="{y}" font-weight="{weight}" font-family="{family}" fill="currentColor" '
        f'fill-opacity="{opacity}">{escape(text)}</text>'
    )
