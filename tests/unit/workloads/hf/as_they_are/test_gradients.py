"""The gradient of every tensor is that of transformers, at several lengths and with padding at either end."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from workloads.hf.check.compare import TOLERANCE, arguments, load, probes
from workloads.hf.check.parity_table import CASES, LENGTH, SIZE, VOCABULARY, Case, random_state
from workloads.hf.tables.convert import to_hf
from workloads.hf.tables.families import family_of
from workloads.transformer_workload import TransformerWorkload

TITLES = ("gpt-oss", "ERNIE, types of tasks", "MPNet", "DeBERTa V3", "PEGASUS")
COMPARED = [case for case in CASES if case.title in TITLES]


def moved(logits: Tensor, real: Tensor) -> Tensor:
    """A number that depends on every logit of the real tokens in its own way."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return (logits * weights)[real].sum()


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.title)
def test_gradients_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    config = case.config
    workload = TransformerWorkload(case.model, config, None, VOCABULARY)  # type: ignore[arg-type]
    state = random_state(workload)
    workload.to_hf(state.__getitem__, str(tmp_path))
    model, theirs = workload.build().eval(), load(str(tmp_path))
    model.load_state_dict(state)
    text = torch.randint(3, SIZE, (4 * LENGTH,), generator=torch.Generator().manual_seed(1))
    for batch in probes(config, VOCABULARY, text, (LENGTH, 7)):
        real = batch.get("decoder_padding", batch["padding"])
        for network, given in ((model, (batch,)), (theirs, ())):
            network.zero_grad()
            moved(network(*given, **({} if given else arguments(config, batch))).logits, real).backward()
        own = {name: p.grad for name, p in model.named_parameters()}
        assert all(gradient is not None and gradient.any() for gradient in own.values())
        wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
        found = dict(to_hf(family_of(config), config, workload.shapes, own.__getitem__))
        assert wanted.keys() <= found.keys()
        for name, gradient in wanted.items():
            size = max(1.0, float(gradient.abs().max()))
            assert float((found[name] - gradient).abs().max()) <= TOLERANCE * size, name


def test_every_class_is_compared() -> None:
    assert [case.title for case in COMPARED] == list(TITLES)
