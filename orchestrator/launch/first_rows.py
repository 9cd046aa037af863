"""Find out from the first row of data what a job can read: the objective, and the columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.fields import columns_of
from orchestrator.data.prepare.columns import messages_in
from orchestrator.data.sources.arrow_files import batches_in, saved_files
from orchestrator.data.sources.files import TABLES
from orchestrator.data.sources.json_rows import begins_list
from orchestrator.data.sources.kinds import Kind, kind_of
from orchestrator.data.sources.lines import LINE_BYTES
from orchestrator.data.sources.plain import Plain
from orchestrator.data.sources.table_rows import values_of_column
from orchestrator.data.store.manifest import FORMAT
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT

PEEK = 2**24
"""Bytes of a line, or of a JSON list, that are read at most."""
BATCH = 256
"""Rows of a table that are read at once."""
USUAL = ("text", "content", "document", "body", "article", "code")
"""Usual names of the column with the text. Without such a column it is the one with the longest text."""
TALKS = ("messages", "conversations")
"""Usual names of the column with a conversation."""
TOOLS = "tools"
"""The name of the column with the tools that a conversation may call."""
ASKED = ("prompt", "instruction", "question")
"""Usual names of the column with the question."""
MORE = ("input", "context")
"""Usual names of the column with the context of a question, which may be empty."""
ANSWERED = ("completion", "output", "response", "answer")
"""Usual names of the column with the answer."""
SPOKEN = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
"""Sets of keys of which a message has one."""
NOT_LOOKED_AT = (".txt", ".tar")
"""Kinds of files without rows, or whose columns follow from the names of their members."""
AS_MESSAGES = 'write them as {"role": "user", "content": "..."}'


@dataclass(frozen=True)
class ReadColumns:
    """The columns that a job reads from rows.

    Attributes:
        objective: the objective that the rows fit; empty for plain text.
        field: the `field` of a source in the job; None if the default does, for example for text in the column text.
        unused: the columns, or paths into them, that the job does not read.
        talks: whether the rows are conversations, which need a chat template.
    """

    objective: str
    field: str | dict[str, str] | None
    unused: tuple[str, ...]
    talks: bool

    def as_pair(self) -> ReadColumns:
        """Return the rows as an encoder-decoder reads them: the question as its source, the answer as its target."""
        if not isinstance(self.field, dict) or self.field.keys() != {"prompt", "completion"}:
            return self
        field = {"source": self.field["prompt"], "target": self.field["completion"]}
        return ReadColumns("seq2seq", field, self.unused, False)


def rows_at(uri: str) -> ReadColumns | None:
    """Return what a job reads of the rows at `uri`, None if the data has no rows or does not exist yet.

    Raises InputError if the rows fit no objective.
    """
    row = _first_row(uri)
    if row is None:
        return None
    leaves = list(_leaves(row))
    objective, field = (
        _compared(row, uri) or _talk(row, leaves, uri) or _answered(row) or _text(row, leaves, uri)
    )
    named = ["text"] if field is None else [field] if isinstance(field, str) else [*field.values()]
    used = {column for template in named for column in columns_of(template)}
    # a single message, such as chosen, has its own leaves
    unused = [path for path, _, _ in leaves if not {path, path.partition(".")[0]} & used]
    talks = objective == "conversation" or any(
        isinstance(row.get(name), list | Mapping) for name in used - {TOOLS}
    )
    return ReadColumns(objective, field, tuple(unused), bool(objective) and talks)


def text_at(uri: str) -> ReadColumns | None:
    """Return the column with the text of the rows at `uri`, whatever else they hold; None without rows."""
    row = _first_row(uri)
    if row is None:
        return None
    leaves = list(_leaves(row))
    _, field = _text(row, leaves, uri)
    return ReadColumns("", field, tuple(path for path, _, _ in leaves if path != (field or "text")), False)


Taken = tuple[str, str | dict[str, str] | None]
"""An objective, and the field of a source."""


def _compared(row: Mapping[str, Any], uri: str) -> Taken | None:
    """Rows with preferences between answers."""
    tools = {TOOLS: TOOLS} if TOOLS in row else {}
    if {"prompt", "completion", "label"} <= row.keys() and str(row["label"]).lower() in ("true", "false"):
        return "kto", {name: name for name in ("prompt", "completion", "label")} | tools
    if not {"chosen", "rejected"} <= row.keys():
        return None
    is_conversation = isinstance(row["chosen"], list)
    kinds = (list,) if is_conversation else (str, list)
    prompts = [name for name in (*ASKED, *TALKS) if isinstance(row.get(name), kinds)]
    if not prompts and not is_conversation:
        problem = "its first row has a chosen and a rejected answer, and no prompt"
        hint = (
            f"name its column {ASKED[0]}; dpo reads prompt, chosen and rejected, or two whole conversations"
        )
        raise InputError(problem, uri, hint)
    return "dpo", {
        **({"prompt": prompts[0]} if prompts else {}), "chosen": "chosen", "rejected": "rejected", **tools,
    }  # fmt: skip


def _talk(row: Mapping[str, Any], leaves: list[tuple[str, str, Any]], uri: str) -> Taken | None:
    """Rows with a conversation, at any depth."""
    for path, name, value in leaves:
        if name not in TALKS or not isinstance(value, list):
            continue
        first = value[0] if value else {"role": "", "content": ""}
        if not isinstance(first, Mapping) or not any(keys <= first.keys() for keys in SPOKEN):
            content = ", ".join(first) if isinstance(first, Mapping) else type(first).__name__
            raise InputError(f"the first of its {path} is not a message but has {content}", uri, AS_MESSAGES)
        return "conversation", {"messages": path, **({TOOLS: TOOLS} if TOOLS in row else {})}
    return None


def _answered(row: Mapping[str, Any]) -> Taken | None:
    """Rows with a question and an answer in two columns. A context, if any, is put below the question."""
    questions = [name for name in ASKED if isinstance(row.get(name), str | list)]
    answered = [name for name in ANSWERED if isinstance(row.get(name), str | list)]
    if not questions or not answered:
        return None
    prompt = questions[0]
    more = [name for name in MORE if isinstance(row.get(name), str) and isinstance(row[prompt], str)]
    if more:
        prompt = "\n\n".join(f"{{{name}}}" for name in (prompt, more[0]))
    return "conversation", {"prompt": prompt, "completion": answered[0]}


def _text(row: Mapping[str, Any], leaves: list[tuple[str, str, Any]], uri: str) -> Taken:
    texts = {path: (name, value) for path, name, value in leaves if isinstance(value, str)}
    if not texts:
        raise InputError(f"its first row has no text, only {', '.join(row)}", uri, "give files with texts")
    named = [path for name in USUAL for path in texts if texts[path][0] == name]
    chosen = named[0] if named else max(texts, key=lambda path: len(texts[path][1]))
    return "", None if chosen == "text" else chosen


def _leaves(row: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the name and the value of everything in a row that is not a mapping, the shallowest first."""
    level = [("", row)]
    while level:
        deeper = []
        for before, values in level:
            for name, value in values.items():
                if isinstance(value, Mapping):
                    deeper.append((f"{before}{name}.", value))
                else:
                    yield f"{before}{name}", name, value
        level = deeper


def row_files(uri: str) -> list[tuple[Any, str, Kind]]:
    """Return the files with rows of a path, glob or folder, empty if there are none yet. A folder may be a dataset that
    `save_to_disk` wrote.

    Raises InputError if they cannot be listed.
    """
    try:
        fs, path = open_file_system(uri, TIMEOUT)
        if fs.isdir(path):
            names = saved_files(fs, path, uri) or sorted(fs.find(path))
        else:
            names = sorted(name for name in fs.glob(path) if fs.isfile(name))
    except InputError:
        raise
    except Exception as error:  # every file system raises its own kind
        problem = f"cannot be listed ({' '.join(str(error).split())[:200]})"
        raise InputError(problem, uri, "check the address and credentials") from None
    kinds = [(name, kind_of(name, None)) for name in names]
    return [(fs, name, kind) for name, kind in kinds if kind is not None and kind.kind not in NOT_LOOKED_AT]


def _first_row(uri: str) -> Mapping[str, Any] | None:
    """Return the first row of the files; None if there is no file with rows yet. Raises InputError."""
    files = row_files(uri)
    try:
        row = next((row for file in files for row in rows_of(*file)), None)
    except (OSError, ValueError, csv.Error) as error:
        raise unreadable(error, uri, "its first row cannot be read") from None
    if files and row is None:
        raise no_rows(uri)
    return row


def no_rows(uri: str) -> InputError:
    """Return the error for files that exist and have no row."""
    return InputError("has no rows", uri, "give files with rows")


def unreadable(error: Exception, uri: str, problem: str) -> InputError:
    """Return `problem` as the error for rows that cannot be read, with the reason."""
    if isinstance(error, UnicodeDecodeError):
        reason, hint = "it is not UTF-8", f"convert it, as in `iconv -f latin1 -t utf-8 {uri} > NEW`"
    else:
        reason, hint = " ".join(str(error).split())[:200], "write the file again"
    return InputError(f"{problem} ({reason})", uri, hint)


def rows_of(fs: Any, name: str, kind: Kind) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; messages are as they are read. Raises ValueError or InputError if the file is wrong."""
    for row in _raw_rows(fs, name, kind):
        if isinstance(row, dict):
            yield {key: messages_in(value) for key, value in row.items()}


def plain_bytes(raw: Any, kind: Kind) -> Any:
    """Return the decompressed bytes of a file."""
    return io.BufferedReader(Plain(raw, kind.compression)) if kind.compression else raw


def is_cut(fs: Any, name: str, kind: Kind) -> bool:
    """Return whether a file is a JSON list of which `rows_of` reads only the beginning."""
    if kind.kind in (*TABLES, ".csv", ".tsv"):
        return False
    with fs.open(name, "rb") as raw:
        file = plain_bytes(raw, kind)
        line = _first_line(file)
        return begins_list(line) and len(file.read(PEEK)) == PEEK and bool(file.read(1).strip())


def _raw_rows(fs: Any, name: str, kind: Kind) -> Iterator[Any]:
    with fs.open(name, "rb") as raw:
        if kind.kind in TABLES:
            yield from _rows_of_table(raw, kind.kind)
            return
        file = plain_bytes(raw, kind)
        if kind.kind in (".csv", ".tsv"):
            csv.field_size_limit(LINE_BYTES)  # Python's own limit is 128 KiB
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            rows = csv.DictReader(text, delimiter="\t" if kind.kind == ".tsv" else ",")
            _check_delimiter(rows.fieldnames or (), name)
            yield from rows
            return
        line = _first_line(file)
        if not line:
            raise InputError("is empty", name, "give a file with rows")
        if begins_list(line):
            yield from _rows_of_list(line + file.read(PEEK))
            return
        while line:
            if line.strip():
                yield json.loads(line)
            line = file.readline(PEEK)


def _check_delimiter(columns: Sequence[str], name: str) -> None:
    """Raise InputError if the only column of a file is a header with another delimiter."""
    if len(columns) == 1 and (others := [mark for mark in ";\t|," if mark in columns[0]]):
        problem = f"has one column, {columns[0]!r}: {others[0]!r} does not separate columns in such a file"
        raise InputError(problem, name, "separate columns by commas in a .csv, by tabs in a .tsv")


def _first_line(file: Any) -> bytes:
    """Return the first line with text; empty at the end. Empty lines are skipped, as when the data is read."""
    while (line := file.readline(PEEK)) and not line.strip():
        pass
    return bytes(line)


def _rows_of_table(file: Any, kind: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    batches = pq.ParquetFile(file).iter_batches(BATCH) if kind == ".parquet" else batches_in(file)
    for batch in batches:
        for at in range(0, batch.num_rows, BATCH):
            part = batch.slice(at, BATCH)
            columns = {name: values_of_column(part.column(name), FORMAT) for name in batch.schema.names}
            for number in range(part.num_rows):
                yield {name: values[number] for name, values in columns.items()}


def _rows_of_list(text: bytes) -> Iterator[Any]:
    """Yield the objects of a JSON list, as far as it was read. Raises ValueError if it has no whole object."""
    begin = text.index(b"[") + 1
    document = text[begin:].decode("utf-8", "ignore")  # the end may be cut within a character
    decoder, at, first = json.JSONDecoder(), 0, True
    while True:
        at += len(document[at:]) - len(document[at:].lstrip(" \t\r\n,"))
        if at >= len(document) or document[at] == "]":
            return
        try:
            row, at = decoder.raw_decode(document, at)
        except ValueError:
            if first:
                raise
            return
        first = False
        yield row
