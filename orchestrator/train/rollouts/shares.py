"""How the ranks divide the prompts of a step: into units, and the units among all ranks, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.sampler import Unit
from workloads.model.answers import Drawn

Share: TypeAlias = list[tuple[int, list[Drawn]]]
"""One rank's share of the answers to prompts: the number of each of its prompts among them, with its answers."""


@dataclass(frozen=True)
class Division:
    """The units of one rank.

    Attributes:
        together: prompts of a unit.
        group: answers to each prompt.
        rank, world: the rank's number, and how many there are.
        has_training_bits: whether answers that are trained on are to have the bits that training computes.
    """

    together: int
    group: int
    rank: int
    world: int
    has_training_bits: bool = False

    def numbers(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the numbers of the answers to each prompt in training, see `Unit`."""
        return [[prompt.number * self.group + k for k in range(self.group)] for prompt in prompts]

    def units(
        self, prompts: Sequence[Prompt], numbers: Sequence[list[int]], is_greedy: bool = False
    ) -> list[Unit]:
        """Return this rank's units. `numbers` are those of the answers to each prompt.

        Args:
            prompts: all prompts of the step.
            numbers: of the answers to each prompt.
            is_greedy: whether the most likely tokens are taken.
        """
        return [
            Unit([prompts[n].tokens for n in unit_numbers], [numbers[n] for n in unit_numbers], is_greedy)
            for unit_numbers in self._unit_prompts(len(prompts))
        ]

    def training_units(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Return this rank's units of the answers that a step trains on."""
        units = self.units(prompts, self.numbers(prompts))
        if not self.has_training_bits:
            return units
        starts = (unit_numbers.start for unit_numbers in self._unit_prompts(len(prompts)))
        return [
            unit._replace(first_row=start * self.group) for unit, start in zip(units, starts, strict=True)
        ]

    def ahead(self, steps: Sequence[Sequence[Prompt]]) -> list[Unit]:
        """Return this rank's units of several steps, which are asked for together."""
        return [unit for prompts in steps for unit in self.training_units(prompts)]

    def share(self, steps: Sequence[int], unit_answers: Iterable[list[list[Drawn]]]) -> Share:
        """Return this rank's share of the answers to the prompts of some steps.

        Args:
            steps: the number of prompts of each step.
            unit_answers: the answers of this rank's units of all steps.
        """
        first_numbers = [sum(steps[:number]) for number in range(len(steps))]
        numbers = [
            first + number
            for first, count in zip(first_numbers, steps, strict=True)
            for number in chain.from_iterable(self._unit_prompts(count))
        ]
        return list(zip(numbers, chain.from_iterable(unit_answers), strict=True))

    def shares(self, steps: Sequence[int], answers: Iterable[list[Drawn]]) -> list[Share]:
        """Return this rank's share of the answers to the prompts of each step, of all `answers` in order.

        Args:
            steps: the number of prompts of each step.
            answers: to the prompts of all steps, in order.
        """
        remaining = iter(answers)
        answers_by_step = [list(islice(remaining, count)) for count in steps]
        return [
            [
                (number, step_answers[number])
                for number in chain.from_iterable(self._unit_prompts(len(step_answers)))
            ]
            for step_answers in answers_by_step
        ]

    def _unit_prompts(self, prompts: int) -> list[range]:
        """Return the numbers of the prompts of each unit, of so many prompts."""
        # Units begin at multiples of `together` whatever the number of ranks: what is decoded together decides the last
        # bits.
        starts = range(self.rank * self.together, prompts, self.world * self.together)
        return [range(first, min(first + self.together, prompts)) for first in starts]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, given by begin and end."""
    total = 0.0
    reached = -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
