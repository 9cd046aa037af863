"""Sources: which files a job names, how they are divided into spans, and the rows of a span, whatever its kind.

`resolve` lists the files, `cut` divides them into parts, `rows.rows` reads a span: documents and records are made of
its rows. What cannot be used goes to `rejected.Rejected`.
"""

from orchestrator.data.sources.files import Part, SourceFile, Span, from_json, opened, to_json
from orchestrator.data.sources.listing import resolve
from orchestrator.data.sources.spans import cut, part_size

__all__ = ["Part", "SourceFile", "Span", "cut", "from_json", "opened", "part_size", "resolve", "to_json"]
