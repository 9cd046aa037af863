"""Publish sections while data is being prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.shards import refuted_engine
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.published import publish, read_section
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest


class Publisher:
    """Publishes each section as soon as all its parts are done, in order.

    Args:
        folder: the prepared data.
        plan: which parts each section needs.
        gather: returns the manifest of the shards of some parts.
        sections: number of sections to publish.
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
        """The parts that the sections need, in the order in which they are needed."""
        return [part for section in range(self.sections) for part in self._plan.numbers(section)]

    def order(self, todo: Sequence[int]) -> list[int]:
        """Return those of the parts `todo` that the sections need, in the order in which they are needed."""
        waiting = set(todo)
        return [part for part in self.parts if part in waiting]

    def look(self, todo: Sequence[int]) -> None:
        """Publish every section whose parts are done. `todo` are the parts that are not done.

        Raises InputError if a section was published before with different shards, because runs may have trained on
        those.
        """
        waiting = set(todo)
        while self._next < self.sections and waiting.isdisjoint(self._plan.numbers(self._next)):
            section_data = self._gather(self._plan.numbers(self._next))
            before = read_section(self._folder, self._next)
            if before and not before.same_tokens(section_data):
                problem = f"section {self._next} differs from what was published before"
                hint = "install the library versions that made it, or start again with data.encode_with: tokenizers"
                raise InputError(problem, self._folder.uri, hint)
            if (refuted := refuted_engine(self._folder)) and refuted in section_data.engines:
                return  # it is made again
            if not before:
                publish(self._folder, self._next, section_data)
            self._next += 1
