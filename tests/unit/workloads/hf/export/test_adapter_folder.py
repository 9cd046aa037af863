"""Adapters as folders of peft: what it loads onto the base computes what our model does."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.hf.check.compare import TOLERANCE, difference, probes
from workloads.hf.export.adapter_folder import check_adapter, write_adapter
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.initialise import normal
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

KNOWN = Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
SMALL = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "max_positions": 64}
ALL = ("*.attention.*", "*.feedforward.*")
CASES = [
    ("llama-tiny", "causal_lm", ALL),
    ("gpt-tiny", "causal_lm", ALL),
    ("gpt-tiny", "causal_lm", ("*.attention.query", "*.attention.value")),
    ("bert-tiny", "masked_lm", ALL),
    ("bert-tiny", "sequence_classification", ("*.attention.*",)),
    ("qwen3-tiny", "causal_lm", ("*.attention.*",)),
    ("t5-tiny", "span_corruption", ("*attention.query", "*.feedforward.*")),
    ("mixtral-tiny", "causal_lm", ("*.attention.*",)),
]


def made(model: str, objective: str, adapter: Adapter) -> TransformerWorkload:
    labels = ("bad", "good") if "classification" in objective else ()
    plain = load(model, objective, KNOWN, changes=SMALL, sequence_length=16, labels=labels)
    assert isinstance(plain, TransformerWorkload)
    found = plain.with_adapter(adapter)
    heads = {name for name in found.frozen if name.startswith("head.") and labels}
    return TransformerWorkload(**{**found.__dict__, "frozen": found.frozen - heads})


QUICK = [(*CASES[2], "dora"), (*CASES[4], "lora")]
REST = [
    pytest.param(*case, kind, marks=pytest.mark.slow)
    for case in CASES
    for kind in ("lora", "rslora", "dora")
    if (*case, kind) not in QUICK
]


@pytest.mark.contract
@pytest.mark.parametrize(("model", "objective", "targets", "kind"), [*QUICK, *REST], ids=str)
def test_peft_loads_it(
    model: str, objective: str, targets: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    workload = made(model, objective, Adapter(kind, 4, 6.0, targets))
    check_adapter(workload)

    larger = 1.0 if model == "t5-tiny" else 3.0  # of GPT and BERT, whose initial weights say little

    def read(name: str) -> Tensor:
        first = workload.initial(name, 3)
        moved = workload.adapter is not None and workload.adapter.adds(name)
        return first + 0.2 * normal(7, name, first.shape) if moved else first * larger

    (tmp_path / "adapter").mkdir()
    write_adapter(workload, read, str(tmp_path / "adapter"), "somewhere")
    workload.base_to_hf(read, str(tmp_path / "base"))
    ours = with_weights(workload, read)
    text = torch.arange(6, 150)
    batches = list(probes(workload.config, KNOWN, text, (16, 7)))
    found = difference(
        workload.config,
        ours,
        str(tmp_path / "base"),
        batches,
        lambda hf: peft.PeftModel.from_pretrained(hf, str(tmp_path / "adapter")).eval(),
    )
    assert found <= TOLERANCE
    assert difference(workload.config, ours, str(tmp_path / "base"), batches) > 100 * TOLERANCE


def test_what_peft_has_no_form_for_is_refused() -> None:
    with pytest.raises(WorkloadError, match="peft has no bitfit"):
        check_adapter(made("gpt-tiny", "causal_lm", Adapter("bitfit", 16, 32.0, ())))
