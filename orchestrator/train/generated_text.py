"""Text that the model generates from a job's prompts between two training steps, under any layout.

Every token is a full forward pass of all prompts, as in an evaluation and without a cache. Only that pass has to know
how a layout divides the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cluster.workers.worker_context import WorkerContext
from orchestrator.evaluate.config import SamplesSpec
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree, gather_json
from orchestrator.resolve.prompts import Prompts
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import shares
from workloads.errors import WorkloadError
from workloads.model.generate import choose
from workloads.model.masks import DECODER_REAL, REAL
from workloads.model.processors import Change, change_of
from workloads.workload import IGNORED, Batch, Sampling, Workload


@dataclass(frozen=True)
class Sampler:
    """Continues prompts with an engine's model. Every rank has a sampler and calls it at the same steps.

    A row of a decoder is its prompt and the tokens generated so far. An encoder-decoder reads the prompt, and its
    decoder's row begins with `prompts.start`. Rows are divided over the ranks like samples of held-out text.
    """

    prompts: Prompts
    spec: SamplesSpec
    layout: Layout
    context: WorkerContext
    engine: Engine
    workload: Workload
    global_batch: int
    sequence_length: int

    def prepare(self) -> None:
        """Import what the generation settings need, so that no step with a time limit has to."""
        _ = self._changes

    def continue_prompts(
        self, step: int, heeds_stop: bool, between: Callable[[], object]
    ) -> list[dict[str, str]] | None:
        """Return each prompt and the text after it; None if it `heeds_stop` and the worker group was asked to stop.

        `between` is called after every token.

        Args:
            step: steps done, for messages.
            heeds_stop: whether a stop of the worker group ends the generation early.
            between: called after every token; tests inject faults there.

        Returns:
            {"prompt", "text"} of each prompt; None if a stop ended it early.
        """
        count = len(self.prompts.rows)
        rank = self.layout.coordinate(self.context.rank_info.rank)["dp"]
        passes = shares(count, self.layout.micro_batch, self.global_batch, self.layout.dp, rank)
        answers: list[list[int]] = [[] for _ in range(count)]
        unfinished, ends = set(range(count)), self.prompts.generation.ends
        self.context.begin_work(f"samples of step {step}", "tokens", self.spec.tokens)
        while unfinished:
            if agree(0, heeds_stop and self.context.stop_requested()).stop:
                return None
            chosen_tokens = []
            for parts in passes:
                row_logits = self.engine.next_logits(
                    [self._micro_batch(part, answers, unfinished) for part in parts]
                )
                chosen_tokens += [
                    [row, self._next_token(row, logits, answers[row])] for row, logits in row_logits
                ]
            # Every rank gets the tokens of all, so that `unfinished` is the same everywhere and all ranks leave the
            # loop together.
            for row, token in itertools.chain(*gather_json(chosen_tokens)):
                answers[row].append(token)
            unfinished = {
                row
                for row in unfinished
                if len(answers[row]) < self.spec.tokens and answers[row][-1] not in ends
            }
            self.context.set_waiting(False)
            self.context.progressed()
            between()
        self.context.set_waiting(True)
        texts = zip(self.prompts.texts, map(self.prompts.decode, answers), strict=True)
        return [{"prompt": prompt, "text": text} for prompt, text in texts]

    def _next_token(self, row: int, logits: Tensor, generated: Sequence[int]) -> int:
        """Return the next token of a row; the end of text if the model has diverged."""
        sampling = Sampling(temperature=self.spec.temperature, seed=self.spec.seed)
        prompt, start = self.prompts.rows[row], self.prompts.start
        read = [*(prompt if start is None else [start]), *generated]
        try:
            return int(
                choose(
                    logits.cpu().unsqueeze(0), sampling, [len(generated)], row, ([self._changes[row]], [read])
                )
            )
        except WorkloadError:
            return self.workload.vocabulary.eos

    @cached_property
    def _changes(self) -> list[Change | None]:
        """How the generation settings change the logits of each row."""
        prompts, max_tokens = self.prompts, self.spec.tokens
        cpu = torch.device("cpu")
        return [change_of(prompts.generation, row, prompts.start, max_tokens, cpu) for row in prompts.rows]

    def _micro_batch(
        self, part: int, generated: Sequence[Sequence[int]], unfinished: Collection[int]
    ) -> Batch:
        """Return micro-batch number `part`. Its labels are the numbers of the rows that continue.

        Places beyond the last row repeat row 0, and nothing is predicted for them.
        """
        prompts, size = self.prompts, self.layout.micro_batch
        numbers = range(part * size, (part + 1) * size)
        row_numbers = [n if n < len(generated) else 0 for n in numbers]
        marks = [n if n in unfinished else IGNORED for n in numbers]
        if prompts.start is None:
            rows = [[*prompts.rows[n], *generated[n]] for n in row_numbers]
            tokens, is_token = self._padded(rows)
            batch: Batch = {"tokens": tokens, "labels": _labels(rows, marks, tokens)}
        else:
            tokens, is_token = self._padded([prompts.rows[n] for n in row_numbers])
            rows = [[prompts.start, *generated[n]] for n in row_numbers]
            answers, is_answer_token = self._padded(rows)
            batch = {"tokens": tokens, "padding": is_token, "decoder_tokens": answers}
            batch["labels"] = _labels(rows, marks, answers)
        if self.workload.config.moe:  # filler rows take no expert capacity from real rows
            routed = torch.tensor([n < len(generated) for n in numbers]).unsqueeze(1)
            batch[REAL] = is_token & routed
            if prompts.start is not None:
                batch[DECODER_REAL] = is_answer_token & routed
        return batch

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return rows padded at their ends, int64 [B, length], and which tokens are real, bool [B, length]."""
        tokens = torch.full((len(rows), self._length), self.workload.vocabulary.eos)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        return tokens, torch.arange(self._length) < lengths

    @cached_property
    def _length(self) -> int:
        """The length of rows: the sequence length, halved while all rows fit, and layout and model can divide it."""
        # An own model may read only multiples of a number.
        can_read = getattr(self.workload.config, "reads_length", lambda _: True)
        longest, tokens = max(map(len, self.prompts.rows)), self.spec.tokens
        # A decoder's row has the prompt and the answer. An encoder-decoder has them in separate rows.
        min_length = longest + tokens if self.prompts.start is None else max(longest, tokens + 1)
        length, divisor = self.sequence_length, 2 * self.layout.cp * self.layout.tp
        # Context and sequence parallelism together need a length that 2 x cp x tp divides.
        while length % (2 * divisor) == 0 and length // 2 >= min_length and can_read(length // 2):
            length //= 2
        return length


def _labels(rows: Sequence[Sequence[int]], marks: Sequence[int], like: Tensor) -> Tensor:
    """Return labels with each row's mark at its last token, and IGNORED elsewhere."""
    labels = torch.full_like(like, IGNORED)
    for number, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        labels[number, len(row) - 1] = mark
    return labels
