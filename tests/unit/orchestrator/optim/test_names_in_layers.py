"""Which parameters belong to layers, and a commit whose optimizer counted other ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import job
from rendezvous import recorded

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.optim.groups import names_in_layers
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.names import pruned_names
from orchestrator.train.engines import optimizer_maker
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.own.model import OwnWorkload, describe_own
from workloads.own.samples import OfSamples
from workloads.workload import Vocabulary

MODULE = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.map = nn.Linear(4, 4)
        if table:
            self.table = nn.Embedding(3, 4)

class Model(nn.Module):
    def __init__(self, before=False, table=False):
        super().__init__()
        if before:
            self.enter = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(table) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def blocks(self):
        return list(self.layers)

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = x + layer.map(x).tanh()
        return self.head(x)[..., 0]
"""
MAPS = [f"network.layers.{number}.map.weight" for number in range(3)]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_layers", raising=False)


def workload(**changes: bool) -> OwnWorkload:
    config = describe_own("of_layers:Model", changes, None)
    return OwnWorkload("of_layers:Model", config, OfSamples(), Vocabulary(1, 0))


@pytest.mark.parametrize("changes", [{}, {"before": True}, {"table": True}])
def test_the_first_layer_is_one_also_if_nothing_comes_before_it(changes: dict[str, bool]) -> None:
    made = workload(**changes)
    assert [name for name in names_in_layers(made) if name.endswith("weight")] == MAPS
    assert pruned_names(PruneSpec(sparsity=0.5, steps=(2, 10)), made) == MAPS


def engine_of(group: dist.ProcessGroup) -> TorchEngine:
    spec = parse(job("text.txt", optimizer={"name": "muon", "lr": 0.1}))
    device = Device(torch.device("cpu"), torch.float32, group)
    return TorchEngine(spec.engine, workload(), Layout(micro_batch=2), device)


def test_a_commit_of_an_earlier_rule_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW once updated the first layer of a model with nothing before it. Its states are none of Muon's."""
    with recorded(0, 1), monkeypatch.context() as earlier:
        group = dist.group.WORLD
        assert group is not None
        earlier.setattr(optimizer_maker, "names_in_layers", lambda made: MAPS[1:])
        before = engine_of(group)
        before.initialise(3)
        store = Store(str(tmp_path / "run"))
        store.publish(1, store.write_shard(1, 0, before.state()), {"position": 0, "receipt": ""})
        reader = store.reader(store.manifest(1))
        before.load(reader)
        earlier.undo()
        with pytest.raises(InputError, match=f"no momentum_buffer of {MAPS[0]}.*init_from"):
            engine_of(group).load(reader)
