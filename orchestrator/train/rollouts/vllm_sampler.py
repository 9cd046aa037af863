"""Answers from vLLM, on the GPU of a rollout worker. vLLM is imported only here, when a sampler is made.

Only its documented interface is used: `LLM` with dummy weights, `generate` with token ids, and `reload_weights` with an
iterator (https://docs.vllm.ai, "Layerwise (Re)loading"). The engine runs in this process, so that weights reach it
without being written or sent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.parallel.device import Device
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.engine_check import INSTALL, WHERE
from orchestrator.train.rollouts.replica import Replica
from orchestrator.train.rollouts.sampler import Unit
from workloads.errors import LogitsNotFinite
from workloads.model.answers import Drawn
from workloads.transformer_workload import TransformerWorkload

SECONDS_AT_LEAST, SECONDS_A_TOKEN = 60.0, 0.5
"""How long vLLM may generate a unit, for its longest answer. Afterwards the worker counts as one that hangs."""


class MissingLogProbability(RuntimeError):
    """vLLM returned a token without its log-probability."""


class VllmSampler:
    """Generates answers with vLLM, see `UnitSampler`.

    Attributes:
        replica: the model in fp32 on the host, whose weights vLLM gets.
    """

    def __init__(
        self,
        workload: TransformerWorkload,
        device: Device,
        seed: int,
        spec: RolloutSpec,
        ends: Collection[int],
        sequence_length: int,
        tokenizer: Tokenizer,
        progressed: Callable[[], object] = lambda: None,
    ) -> None:
        """Start vLLM, from a configuration and a tokenizer alone.

        Args:
            workload: the model.
            device: this worker's device; vLLM computes in its compute dtype.
            seed: the seed of the run.
            spec: how answers are generated.
            ends: tokens that end an answer.
            sequence_length: maximum tokens of a prompt and its answer together.
            tokenizer: turns tokens into text, in which vLLM looks for texts that end an answer.
            progressed: called each second while it generates.

        Raises InputError if vLLM is not installed.
        """
        self.replica = Replica(workload, Device(torch.device("cpu"), torch.float32, device.group), seed)
        self._workload = workload
        self._spec = spec
        self._seed = seed
        self._ends = sorted(ends)
        self._progressed = progressed
        # Else the engine runs in a process of its own, which cannot take tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise InputError("vllm is not installed on this node", WHERE, INSTALL) from None
        self._parameters: Any = vllm.SamplingParams
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(workload.hf_config()), default=str))
            tokenizer.save(str(Path(folder, "tokenizer.json")))
            read_as = {"tokenizer_class": "PreTrainedTokenizerFast"}
            Path(folder, "tokenizer_config.json").write_text(json.dumps(read_as))
            self._engine: Any = vllm.LLM(
                model=folder,
                load_format="dummy",
                dtype=str(device.compute).removeprefix("torch."),
                max_model_len=sequence_length,
                seed=seed % 2**32,
                generation_config="vllm",
                # At the temperature, as own generation has them.
                logprobs_mode="processed_logprobs",
            )

    def use_replica(self) -> None:
        """See `UnitSampler.use_replica`."""
        tensors = {**dict(self.replica.model.named_parameters()), **dict(self.replica.model.named_buffers())}
        weights = self._workload.hf_state(tensors.__getitem__)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        # Earlier weights computed what it keeps of prompts.
        self._engine.reset_prefix_cache()

    def answers_of(self, unit: Unit) -> list[list[Drawn]]:
        """See `UnitSampler.answers_of`.

        Raises:
            MissingLogProbability: a token has no log-probability.
            LogitsNotFinite: a log-probability is not finite.
        """
        requests = [
            (prompt, number)
            for prompt, numbers in zip(unit.prompts, unit.numbers, strict=True)
            for number in numbers
        ]
        max_seconds = SECONDS_AT_LEAST + SECONDS_A_TOKEN * self._spec.max_tokens
        with _reporting(self._progressed, max_seconds):
            outputs = self._engine.generate(
                [{"prompt_token_ids": prompt} for prompt, _ in requests],
                [self._sampling(number, unit.is_greedy) for _, number in requests],
                use_tqdm=False,
            )
        drawn = iter([_drawn(request.outputs[0]) for request in outputs])
        return [[next(drawn) for _ in numbers] for numbers in unit.numbers]

    def _sampling(self, number: int, is_greedy: bool) -> Any:
        """Return how the answer of a number is drawn."""
        return self._parameters(
            temperature=0.0 if is_greedy else self._spec.temperature,
            seed=answer_seed(self._seed, number),
            max_tokens=self._spec.max_tokens,
            stop_token_ids=self._ends,
            ignore_eos=True,  # `ends` has the tokens that end an answer
            stop=self._spec.stop or None,
            include_stop_str_in_output=True,
            logprobs=0,  # of the drawn token alone
        )


@contextmanager
def _reporting(progressed: Callable[[], object], max_seconds: float) -> Iterator[None]:
    """Call `progressed` each second meanwhile, for at most so many seconds: vLLM does not tell that it goes on."""
    finished = threading.Event()

    def report() -> None:
        end = time.monotonic() + max_seconds
        while not finished.wait(1.0) and time.monotonic() < end:
            progressed()

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def answer_seed(seed: int, number: int) -> int:
    """Return the seed of an answer, from that of the run and the number of the answer: 63 bits, not negative.

    Args:
        seed: of the run.
        number: of the answer.
    """
    digest = hashlib.blake2b(struct.pack("<2q", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _drawn(output: Any) -> Drawn:
    """Return an answer of vLLM. Its entropy is NaN, which no metric counts: vLLM does not compute it."""
    tokens = [int(token) for token in output.token_ids]
    log_probabilities: Sequence[Mapping[int, Any] | None] = output.logprobs or []
    if output.finish_reason not in ("stop", "length") or not tokens:
        raise RuntimeError(
            f"vLLM ended an answer after {len(tokens)} tokens, because of {output.finish_reason}"
        )
    if len(log_probabilities) != len(tokens):
        raise MissingLogProbability(
            f"vLLM returned {len(log_probabilities)} log-probabilities for {len(tokens)} tokens"
        )
    values = []
    for position, (token, candidates) in enumerate(zip(tokens, log_probabilities, strict=True)):
        value = getattr((candidates or {}).get(token), "logprob", None)
        if value is None:
            raise MissingLogProbability(f"vLLM returned no log-probability of token {position} of an answer")
        if not math.isfinite(value):
            raise LogitsNotFinite
        values.append(float(value))
    return Drawn(tokens, values, math.nan, output.finish_reason == "stop")
