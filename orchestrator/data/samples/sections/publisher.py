"""Publishing sections in the course of a preparation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.shards import refuted_engine
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.published import publish, read_section
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest


class Publisher:
    """Publishes each section when all its parts are done, in order.

    Args:
        folder: the prepared data.
        plan: which parts each section needs.
        gather: the manifest of the shards of some parts.
        sections: how many are to be published.
    """

    def __init__(
        self,
        folder: DataFolder,
        plan: SectionPlan,
        gather: Callable[[Sequence[int]], DataManifest],
        sections: int,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._gather = gather
        self.sections = sections
        self._next = 0

    @property
    def parts(self) -> list[int]:
        """The parts that the sections need, in the order in which they need them."""
        return [part for section in range(self.sections) for part in self._plan.numbers(section)]

    def order(self, todo: Sequence[int]) -> list[int]:
        """Those of the parts `todo` that the sections need, in that order."""
        left = set(todo)
        return [part for part in self.parts if part in left]

    def look(self, todo: Sequence[int]) -> None:
        """Publish what can be: only the parts `todo` are not done.

        Raises InputError if a section was published with other shards: who trains has used those.
        """
        left = set(todo)
        while self._next < self.sections and left.isdisjoint(self._plan.numbers(self._next)):
            found = self._gather(self._plan.numbers(self._next))
            before = read_section(self._folder, self._next)
            if before and not before.same_tokens(found):
                what = f"section {self._next} cannot be made again as it was published"
                hint = "install the versions that it was made with; or begin anew, with data.encode_with: tokenizers"
                raise InputError(what, self._folder.uri, hint)
            if (refuted := refuted_engine(self._folder)) and refuted in found.engines:
                return  # which is made again
            if not before:
                publish(self._folder, self._next, found)
            self._next += 1
