"""The protocol of samplers, which generate answers, and the project's own sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from orchestrator.parallel.device import Device
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.replica import Replica
from workloads.model.answers import Drawn, draw_answers
from workloads.workload import Ended, Sampling, Workload


class AnswerSampler(Protocol):
    """Generates answers with the weights that it took last."""

    def take(self, engine: Engine) -> None:
        """Take the weights of an engine. All ranks call it together."""

    def answers(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]], is_greedy: bool = False
    ) -> list[list[Drawn]]:
        """Return the answers to each prompt: a pure function of the weights, the prompts and the numbers.

        Args:
            prompts: token ids of each prompt.
            numbers: for each prompt, the number of each of its answers, which determines what is drawn.
            is_greedy: take the most likely tokens.
        """


class OwnSampler:
    """Generates with a copy of the whole model on this rank, and a key-value cache."""

    def __init__(
        self,
        workload: Workload,
        device: Device,
        seed: int,
        asked: RolloutSpec,
        ends: Collection[int],
        ended: Ended | None = None,
        progressed: Callable[[], object] = lambda: None,
    ) -> None:
        """`ends` are tokens that end an answer, as `ended` says of the tokens of one. `progressed` is called after each
        token.
        """
        self._replica = Replica(workload, device, seed)
        self._config = workload.config
        self._device = device
        self._asked = asked
        self._sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, seed)
        self._ends = ends
        self._ended = ended
        self._progressed = progressed

    def take(self, engine: Engine) -> None:
        """See `AnswerSampler.take`."""
        self._replica.take(engine)

    def answers(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]], is_greedy: bool = False
    ) -> list[list[Drawn]]:
        """See `AnswerSampler.answers`."""
        sampling = dataclasses.replace(self._sampling, temperature=0.0) if is_greedy else self._sampling
        with self._device.casting_once(), self._device.autocast():
            return draw_answers(
                self._replica.model,
                self._config,
                prompts=prompts,
                numbers=numbers,
                max_tokens=self._asked.max_tokens,
                sampling=sampling,
                ends=self._ends,
                ended=self._ended,
                progressed=self._progressed,
            )
