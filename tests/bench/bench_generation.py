"""Tokens a second of `draw_answers` and of transformers' `generate` with a static cache, interleaved in one process.

    python tests/bench/bench_generation.py [rounds]

The weights, prompts, number of answers and number of tokens are the same, and no answer ends early. Both draw from the
whole distribution. Ours also returns log-probabilities and entropies; transformers returns tokens only.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import paths  # noqa: F401
import torch
import transformers

from workloads.hf.check.parity_table import random_state
from workloads.model.answers import draw_answers
from workloads.model.presets import PRESETS
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Sampling, Vocabulary

PROMPTS, GROUP, TOKENS, READ = 8, 8, 64, 12
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "hidden 128, 4 layers, vocabulary 256": (
        256,
        {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384},
    ),
    "hidden 384, 6 layers, vocabulary 8,000": (
        8000,
        {"hidden": 384, "layers": 6, "heads": 6, "kv_heads": 2, "intermediate": 1024},
    ),
}


def generators(vocabulary: int, changes: dict[str, Any], folder: str) -> dict[str, Callable[[], int]]:
    """Return functions that generate all answers and return the number of tokens."""
    config = PRESETS["llama-tiny"].changed({**changes, "vocab_size": vocabulary})
    workload = TransformerWorkload("llama-tiny", config, None, Vocabulary(vocabulary, eos=1, pad=0))
    state = random_state(workload)
    model = workload.build()
    model.load_state_dict(state)
    model.eval()
    workload.to_hf(state.__getitem__, folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(3)
    prompts = torch.randint(3, vocabulary, (PROMPTS, READ))

    def ours() -> int:
        found = draw_answers(
            model,
            workload.config,
            prompts=prompts.tolist(),
            numbers=[[prompt * GROUP + k for k in range(GROUP)] for prompt in range(PROMPTS)],
            max_tokens=TOKENS,
            sampling=Sampling(temperature=1.0, seed=5),
            ends=(),
        )
        return sum(len(answer.tokens) for each in found for answer in each)

    def theirs() -> int:
        found = other.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            num_return_sequences=GROUP,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
        )
        return int(found.shape[0] * (found.shape[1] - READ))

    return {"ours": ours, "transformers": theirs}


def measured(generate: Callable[[], int]) -> tuple[float, float]:
    """Return tokens per second, and tokens per second of the processor, which others' load changes less."""
    started = time.perf_counter(), time.process_time()
    tokens = generate()
    assert tokens == PROMPTS * GROUP * TOKENS
    return tokens / (time.perf_counter() - started[0]), tokens / (time.process_time() - started[1])


def main(rounds: int = 7) -> None:
    """Print a row for each size."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, one thread, {rounds} rounds")
    print("| model | ours, tokens/s | transformers, tokens/s | ratio | ratio by processor time |")
    print("|---|---|---|---|---|")
    for title, (vocabulary, changes) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            made = generators(vocabulary, changes, folder)
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for number in range(rounds + 1):
            for name in sorted(made, reverse=bool(number % 2)):
                found = measured(made[name])
                speeds[name] += [found] if number else []  # the first round warms up
        medians = [f"{statistics.median(wall for wall, _ in found):,.0f}" for found in speeds.values()]
        told = []
        for kind in (0, 1):
            pairs = zip(speeds["ours"], speeds["transformers"], strict=True)
            ratios = [ours[kind] / theirs[kind] for ours, theirs in pairs]
            told.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print("| " + " | ".join([title, *medians, *told]) + " |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
