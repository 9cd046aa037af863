"""Step time and peak memory of our models beside the same models of transformers, in one interleaved run.

python tests/bench/bench_workloads.py [--batch 2] [--length 128] [--rounds 5] [--models gpt2 bert-base]

A step is forward, backward and AdamW in fp32 on one CPU thread, without dropout; BERT predicts 15 % of the tokens.
Times alternate between the two models and the ratio is the median over rounds; memory is the peak of two steps in
a fresh process, less what it had before the model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from workloads.hf.check.compare import arguments
from workloads.hf.convert.write_folder import hf_config_of
from workloads.hf.tables.families import family_of
from workloads.model.losses import loss
from workloads.model.presets import preset
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

MASKED = 0.15
"""Share of the tokens that a masked language model predicts."""


def ours(name: str) -> TransformerWorkload:
    """Our workload, without an objective."""
    config = preset(name).changed({"sentence_head": False})
    return TransformerWorkload(name, config, None, Vocabulary(config.vocab_size, 0, pad=1))  # type: ignore[arg-type]


def stepper(name: str, kind: str, batch: int, length: int) -> Callable[[], float]:
    """A function that makes one training step of `kind` ('ours' or 'transformers') and returns its loss."""
    workload = ours(name)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, workload.config.vocab_size, (batch, length), generator=random)
    hidden = (
        torch.rand(batch, length, generator=random) > MASKED if workload.config.head == "masked" else False
    )
    inputs = {"tokens": tokens, "labels": tokens.roll(-1, 1).masked_fill(torch.as_tensor(hidden), -100)}
    model, forward = _ours(workload, inputs) if kind == "ours" else _theirs(workload, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> float:
        value = forward()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def _ours(workload: TransformerWorkload, inputs: dict[str, Tensor]) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = workload.build().train()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})

    def forward() -> Tensor:
        found = loss(workload.config, model(inputs), inputs)
        return found.total / found.count

    return model, forward


def _theirs(
    workload: TransformerWorkload, inputs: dict[str, Tensor]
) -> tuple[nn.Module, Callable[[], Tensor]]:
    import transformers

    family = family_of(workload.config)
    config = hf_config_of(workload.config, workload.vocabulary)
    model = getattr(transformers, family.head(workload.config).kind)(config).train()
    call = {**arguments(workload.config, inputs), "labels": inputs["labels"], "use_cache": False}
    return model, lambda: model(**call).loss


def seconds(step: Callable[[], float]) -> float:
    """Processor time of one step on one thread, which other work on the machine disturbs less than wall time."""
    start = time.process_time()
    step()
    return time.process_time() - start


def peak_memory(job: tuple[str, str, int, int]) -> float:
    """MiB that two steps need at most, in this process alone."""
    import transformers

    assert transformers.AutoModel
    torch.set_num_threads(1)
    before = _status("VmRSS")
    step = stepper(*job)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here: building is not counted
    for _ in range(2):
        step()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def row(name: str, batch: int, length: int, rounds: int) -> str:
    """A row of the table."""
    steps = {kind: stepper(name, kind, batch, length) for kind in ("ours", "transformers")}
    for step in steps.values():
        step()
    times = [{kind: seconds(step) for kind, step in steps.items()} for _ in range(rounds)]
    ratio = statistics.median(t["ours"] / t["transformers"] for t in times)
    mine, other = (statistics.median(t[kind] for t in times) * 1000 for kind in steps)
    context = multiprocessing.get_context("spawn")
    memory = []
    for kind in steps:
        with context.Pool(1) as pool:
            memory.append(pool.map(peak_memory, [(name, kind, batch, length)])[0])
    return (
        f"| {name} | {batch} x {length} | {mine:.0f} ms | {other:.0f} ms | {ratio:.2f} | "
        f"{memory[0]:.0f} MiB | {memory[1]:.0f} MiB | {memory[0] / memory[1]:.2f} |"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert-base"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | batch | ours | transformers | ratio | memory, ours | transformers | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        print(row(name, options.batch, options.length, options.rounds), flush=True)


if __name__ == "__main__":
    main()
