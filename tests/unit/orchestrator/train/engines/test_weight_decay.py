"""What decays is what transformers' Trainer decays, of every family; vectors, which it decays too, do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import groups_of, rates_of
from orchestrator.parallel.partition import Cut
from workloads.hf.check.parity_table import CASES, LENGTH, VOCABULARY, Case
from workloads.hf.convert.write_folder import hf_config_of
from workloads.hf.tables.convert import row_of, used
from workloads.hf.tables.families import family_of
from workloads.load import load
from workloads.objectives.causal_lm import CausalLM
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SPEC = OptimizerSpec(weight_decay=0.1)
VECTORS = ("sinks", "mask_emb")
"""Vectors that the Trainer decays by their names: gpt-oss's sinks, and XLNet's hidden word."""


def decayed(workload: Any, spec: OptimizerSpec = SPEC) -> set[str]:
    """The names of the parameters of a workload that decay."""
    rate = rates_of(spec, workload)
    found = set()
    for name, shape in workload.shapes.items():
        whole = Cut(
            tuple(shape), (0,) * len(shape), tuple(shape), False, False, False, name in workload.stacks
        )
        (group,) = groups_of(spec, [(torch.nn.Parameter(torch.empty(0)), whole.matrix, rate(name))])
        if group["weight_decay"]:
            found.add(name)
    return found


def of_trainer(model: Any) -> set[str]:
    return set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


def workload_of(case: Case, rule: int = 6) -> TransformerWorkload:
    objective = CausalLM(vocabulary=VOCABULARY, sequence_length=LENGTH, seed=0, rule=rule)
    return TransformerWorkload(case.model, case.config, objective, VOCABULARY)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.config.generator], ids=lambda case: case.title
)
def test_a_family_decays_as_in_the_trainer(case: Case) -> None:
    workload, family = workload_of(case), family_of(case.config)
    config = hf_config_of(case.config, VOCABULARY)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    theirs, known = of_trainer(model), {name for name, _ in model.named_parameters()}
    ours, compared = decayed(workload), 0
    for name in workload.shapes:
        row, _, number = row_of(family, case.config, name)
        there = [hf_name for hf_name in used(family, case.config, row, number) if hf_name in known]
        for hf_name in there[:1]:
            assert (name in ours) == (hf_name in theirs and not hf_name.endswith(VECTORS)), hf_name
            compared += 1
    assert compared > len(workload.shapes) // 2


SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4}  # fmt: skip
CLASSES = {
    "cohere": transformers.CohereConfig(**SIZES, use_qk_norm=True),
    "stablelm": transformers.StableLmConfig(**SIZES, qk_layernorm=True),
    "longt5": transformers.LongT5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_is_run_as_it_is_decays_as_in_the_trainer(name: str, tmp_path: Any) -> None:
    CLASSES[name].save_pretrained(tmp_path)
    objective = "seq2seq" if name == "longt5" else "causal_lm"
    vocabulary = Vocabulary(97, eos=2, pad=1)
    workload = load(f"hf:{tmp_path}", objective, vocabulary, sequence_length=16)
    matrices = {n for n, p in workload.config.bare.named_parameters() if p.dim() > 1}
    wanted = of_trainer(workload.config.bare) & matrices
    assert decayed(workload) == {f"network.{n}" for n in wanted}


def test_torch_decays_vectors_that_do_not_decay_here() -> None:
    """By itself AdamW decays all that it is given: in plain loops, and where one pattern matches all parameters."""
    vector, matrix = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, 4))
    vector.grad, matrix.grad = torch.zeros(4), torch.zeros(4, 4)
    torch.optim.AdamW([vector, matrix], lr=1.0, weight_decay=0.1).step()
    assert float(vector[0]) == pytest.approx(0.9)
    assert float(matrix[0, 0]) == pytest.approx(0.9)
    workload = workload_of(next(case for case in CASES if case.title == "GPT-2"))
    vectors = {name for name, shape in workload.shapes.items() if len(shape) == 1}
    assert vectors
    assert decayed(workload) == workload.shapes.keys() - vectors


def test_a_run_of_an_earlier_version_decays_what_it_did() -> None:
    case = next(case for case in CASES if case.title == "T5")
    tables = {"encoder.relative_bias.weight", "decoder.relative_bias.weight"}
    before, now = decayed(workload_of(case, rule=5)), decayed(workload_of(case))
    assert before - now == tables
    assert before >= now
    without = replace(workload_of(case), objective=None)
    assert decayed(without) == before


def test_a_group_may_decay_what_does_not_by_itself() -> None:
    case = next(case for case in CASES if case.title == "T5")
    groups = [
        {"match": ["encoder.relative_bias.*"], "weight_decay": 0.2},
        {"match": ["decoder.*"], "lr_scale": 0.5},
    ]
    spec = OptimizerSpec.model_validate({"weight_decay": 0.1, "groups": groups})
    found = decayed(workload_of(case), spec)
    assert "encoder.relative_bias.weight" in found
    assert "decoder.relative_bias.weight" not in found
    objective = SimpleNamespace(rule=6)
    workload: Any = SimpleNamespace(objective=objective, depth=lambda name: 0, lr_scale=lambda name: 1.0)
    assert rates_of(spec, workload)("decoder.relative_bias.weight").group == 0.5
