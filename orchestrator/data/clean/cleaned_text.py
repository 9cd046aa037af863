"""The text of a part after cleaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.data.clean.documents import texts
from orchestrator.data.clean.passes import changed, changes, kept_of
from orchestrator.data.clean.plan import Cleaning
from orchestrator.data.sources import Part
from orchestrator.data.sources.documents import TextPiece, cut_text
from orchestrator.data.sources.identity import part_key
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import FORMAT


@dataclass(frozen=True)
class CleanedText:
    """Text whose documents all steps have judged; the decisions are in the folder `uri`."""

    cleaning: Cleaning
    uri: str

    def pieces(self, part: Part, rejected: Rejected | None = None) -> Iterator[TextPiece]:
        """Yield what is left of a part, in pieces. Unusable rows go to `rejected`.

        Raises InputError as reading the part does.
        """
        is_kept = kept_of(DataFolder(self.uri), self.cleaning.key, part_key(part))
        steps = changes(self.uri, self.cleaning, None)
        for number, (text, row) in enumerate(texts(part, self.cleaning.columns, rejected)):
            if is_kept[number]:
                yield from cut_text(changed(text, row, steps, part), FORMAT)
