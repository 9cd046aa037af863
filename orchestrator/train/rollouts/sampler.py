"""The protocols of samplers, which generate answers, and the project's own sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from orchestrator.parallel.device import Device
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.replica import Replica
from orchestrator.train.rollouts.training_pass import TrainingPass
from workloads.model.answers import Drawn, draw_answers
from workloads.model.exact_answers import Read, Text, exact_answers
from workloads.workload import Ended, Sampling, Workload


class Unit(NamedTuple):
    """Prompts whose answers are decoded together.

    Attributes:
        prompts: token ids of each prompt.
        numbers: for each prompt, the number of each of its answers, which determines what is drawn.
        is_greedy: whether the most likely tokens are taken.
        first_row: if the answers are to have the bits that training computes, the place of the first one among the rows
            of its step; else None.
    """

    prompts: list[list[int]]
    numbers: list[list[int]]
    is_greedy: bool = False
    first_row: int | None = None


class GeneratedAhead(NamedTuple):
    """Answers that were asked for.

    Attributes:
        answers: as of `AnswerSampler.answers`.
        overlapped: when they were generated while this rank did something else: begin and end of each unit, in seconds
            from asking.
    """

    answers: list[list[list[Drawn]]]
    overlapped: Sequence[tuple[float, float]] = ()


class AnswerSampler(Protocol):
    """Generates answers with the weights that it took last."""

    def take(self, engine: Engine) -> None:
        """Take the weights of an engine. All ranks call it together."""

    def answers(self, units: Sequence[Unit]) -> list[list[list[Drawn]]]:
        """Return the answers to each prompt of each unit: a pure function of the weights and of the unit."""

    def ask(self, units: Sequence[Unit]) -> None:
        """Ask for the answers of units by the weights taken last, which `collect` returns.

        Other weights may be taken in between, and other answers generated.
        """

    def collect(self) -> GeneratedAhead:
        """Wait for the answers that were asked for last, and return them."""


class UnitSampler(Protocol):
    """Generates the answers of one unit after the other, in a rollout worker.

    Attributes:
        replica: the model that a worker reads weights into.
    """

    replica: Replica

    def use_replica(self) -> None:
        """Generate with the weights that are now in `replica`."""

    def answers_of(self, unit: Unit) -> list[list[Drawn]]:
        """Return the answers to each prompt of a unit, each token with its log-probability at the temperature."""


class OwnSampler:
    """Generates with a copy of the whole model in this process, and a key-value cache.

    Attributes:
        replica: the copy.
    """

    def __init__(
        self,
        workload: Workload,
        device: Device,
        seed: int,
        spec: RolloutSpec,
        ends: Collection[int],
        ended: Ended | None = None,
        progressed: Callable[[], object] = lambda: None,
        training_pass: TrainingPass | None = None,
    ) -> None:
        """`ends` are tokens that end an answer, as `ended` says of the tokens of one. `progressed` is called after each
        token. `training_pass` reads the answers of units that ask for the bits of training.
        """
        self.replica = Replica(workload, device, seed)
        self._config = workload.config
        self._device = device
        self._spec = spec
        self._sampling = Sampling(spec.temperature, spec.top_k, spec.top_p, seed)
        self._ends = ends
        self._ended = ended
        self._progressed = progressed
        self._training_pass = training_pass
        self._ahead: list[list[list[Drawn]]] = []

    def take(self, engine: Engine) -> None:
        """See `AnswerSampler.take`."""
        self.replica.take(engine)

    def answers(self, units: Sequence[Unit]) -> list[list[list[Drawn]]]:
        """See `AnswerSampler.answers`."""
        return [self.answers_of(unit) for unit in units]

    def ask(self, units: Sequence[Unit]) -> None:
        """See `AnswerSampler.ask`. Generates at once: this process has nothing else to generate with."""
        self._ahead = self.answers(units)

    def collect(self) -> GeneratedAhead:
        """See `AnswerSampler.collect`."""
        return GeneratedAhead(self._ahead)

    def use_replica(self) -> None:
        """See `UnitSampler.use_replica`. It generates with the replica itself."""

    def answers_of(self, unit: Unit) -> list[list[Drawn]]:
        """See `UnitSampler.answers_of`."""
        has_training_bits = unit.first_row is not None and self._training_pass is not None
        # A race draws the same token from probabilities that differ in the last bits, so most of a draft survives its
        # reading.
        temperature = 0.0 if unit.is_greedy else self._sampling.temperature
        how: dict[str, Any] = {
            "sampling": replace(self._sampling, temperature=temperature, is_race=has_training_bits),
            "ends": self._ends,
            "ended": self._ended,
        }
        request: dict[str, Any] = {
            "prompts": unit.prompts,
            "numbers": unit.numbers,
            "max_tokens": self._spec.max_tokens,
        }
        model = self.replica.model
        draft = partial(draw_answers, model, self._config, progressed=self._progressed, **how)
        with self._device.casting_once(), self._device.autocast():
            if unit.first_row is None or self._training_pass is None:
                return draft(**request)
            first_row, training_pass = unit.first_row, self._training_pass

            def read(rows: range, texts: Sequence[Text]) -> list[Read]:
                self._progressed()
                return training_pass.read(model, first_row, rows, texts)

            passes = training_pass.passes(first_row, sum(map(len, unit.numbers)))
            return exact_answers(draft, read, passes, **request, **how)
