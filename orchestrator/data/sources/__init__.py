"""Sources: the files that a job names, their division into spans, and the rows of a span of any kind.

`resolve` lists the files, `cut` divides them into parts, `rows.rows` reads a span. Documents and records are made
from its rows. Unusable input goes to `rejected.Rejected`.
"""

from orchestrator.data.sources.files import Part, SourceFile, Span, from_json, opened, to_json
from orchestrator.data.sources.listing import resolve
from orchestrator.data.sources.spans import cut, part_size

__all__ = ["Part", "SourceFile", "Span", "cut", "from_json", "opened", "part_size", "resolve", "to_json"]
