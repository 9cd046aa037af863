"""Own code that would make a run another one under another layout is refused before it starts, in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from jobs import job as text_job
from jobs import write_text
from safetensors.torch import save_file

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import code_of
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.launch.job_checks import check_job
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import BOUNDLESS
from orchestrator.resolve.resolved_job import resolve

CODE = """
import numpy as np, torch
from torch import nn

class Points:
    def __init__(self, count=6): self.count = count
    def __len__(self): return self.count
    def sample(self, number, rng): return {"x": rng.standard_normal(4), "y": float(number)}
class Odd(Points):
    def sample(self, number, rng): return {"x": np.zeros(number + 1)}
class Words(Points):
    def sample(self, number, rng): return {"x": "text"}

class Line(nn.Module):
    def __init__(self, width=3, **more):
        super().__init__()
        self.one, self.two = nn.Linear(4, width), nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)
    def forward(self, x): return self.two(self.one(x))[:, 0]
    def loss(self, batch): return (self(batch["x"]) - batch["y"]).square()
class Mean(Line):
    def loss(self, batch): return super().loss(batch).mean()
class Drops(Line):
    def forward(self, x): return super().forward(nn.functional.dropout(x, 0.5))
class Experts(Line):
    def __init__(self): super().__init__(); self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    def loss(self, batch):
        x = torch.stack([self.each[int(y)](x) for x, y in zip(batch["x"], batch["y"])])
        return (self(x) - batch["y"]).square()
class Norms(Line):
    def forward(self, x): return super().forward(x - x.mean(0))
class Counts(Line):
    def __init__(self): super().__init__(); self.norm = nn.BatchNorm1d(4, momentum=0.1)
    def forward(self, x): self.norm.running_mean.add_(1); return super().forward(x)
class Reads(Line):
    def __init__(self): super().__init__(); self.n = int(torch.ones(1).sum())
class Fixed(Line):
    def loss(self, batch): return batch["y"]
class Clock(Line):
    def __init__(self): super().__init__(); nn.init.constant_(self.one.bias, np.random.rand())
class Noise(Line):
    def __init__(self):
        super().__init__(); self.register_buffer("noise", torch.ones(4) * np.random.rand(), persistent=False)
class Waves(Line):
    def __init__(self): super().__init__(); self.register_buffer("waves", torch.randn(4), persistent=False)
class Named(Line):
    def loss(self, batch): return super().loss(batch), {"lr": batch["y"]}
class NoLoss(nn.Module): ...

class First(nn.Module):
    def __init__(self): super().__init__(); self.up = nn.Linear(4, 6)
    def forward(self, batch): return self.up(batch["x"])
class Middle(nn.Module):
    def __init__(self): super().__init__(); self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
    def forward(self, x, batch): return x + self.down(torch.tanh(self.up(x)))
class Last(nn.Module):
    def __init__(self): super().__init__(); self.out = nn.Linear(6, 1)
    def forward(self, x, batch): return (self.out(x)[:, 0] - batch["y"]).square()
class Divided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = First()
        self.middle, self.last = self.make(), Last()
    def make(self): return Middle()
    def stages(self): return [self.first, self.middle, self.last]
    def sharding(self): return {"middle.up": "column", "middle.down": "row"}
class Both(Divided):
    def loss(self, batch): return self.last(self.first(batch), batch)
class Reaches(Divided):
    def make(self):
        made, first = Middle(), self.first
        made.forward = lambda x, batch: first(batch) + x
        return made
class Integers(Divided):
    def make(self):
        made = Middle()
        made.forward = lambda x, batch: (x, batch["x"].long())
        return made
class Outside(Divided):
    def __init__(self): super().__init__(); self.scale = nn.Parameter(torch.ones(1))
class Foreign(Divided):
    def stages(self): return [First(), self.middle, self.last]
class Style(Divided):
    def sharding(self): return {"middle.up": "columns"}
class Absent(Divided):
    def sharding(self): return {"middle.in": "column"}
class Kind(Divided):
    def sharding(self): return {"middle": "column"}
class Beside(Middle):
    def __init__(self): super().__init__(); self.up = nn.Linear(6, 16)
    def forward(self, x, batch):
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(torch.sigmoid(gate) * value)
class Fused(Divided):
    def make(self): return Beside()
class Scaled(Middle):
    def __init__(self): super().__init__(); self.scale = nn.Linear(1, 1)
    def forward(self, x, batch):
        inner = self.up(x).unsqueeze(-1)
        return x + self.down(torch.tanh(self.scale(inner)).squeeze(-1))
class Unshared(Divided):
    def make(self): return Scaled()
class Shared(Unshared):
    def sharding(self): return {**super().sharding(), "middle.scale": "shared"}
class Heads(Divided):
    heads = 2
class Nan(Line):
    def loss(self, batch): return super().loss(batch) * float("nan")
class Behind(Line):
    def __init__(self): super().__init__(); nn.init.zeros_(self.two.weight)
    def forward(self, x): return self.two(nn.functional.dropout(self.one(x), 0.5))[:, 0]
class Turned(Line):
    def __init__(self): super().__init__(); self.table = nn.Parameter(torch.randn(3, 4).t())
    def forward(self, x): return (x @ self.table).sum(1) + super().forward(x)
class Frozen(Line):
    def __init__(self): super().__init__(); self.one.requires_grad_(False)
class Attribute(Line):
    def __init__(self): super().__init__(); self.table = torch.ones(4)
class Lazy(Line):
    def __init__(self): super().__init__(); self.one = nn.LazyLinear(3)
class Complex(Line):
    def __init__(self): super().__init__(); self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
class Halves(Line):
    def __init__(self): super().__init__(); self.shift = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    def forward(self, x): return super().forward(x + self.shift.float())
class Doubles(Halves):
    def __init__(self): super().__init__(); self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))
class Empty(Line):
    def __init__(self): super().__init__(); self.one.none = nn.Parameter(torch.empty(0, 4))
    def forward(self, x): return super().forward(x) + self.one.none.sum()
class Reentrant(Line):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        return self.two(checkpoint(torch.tanh, self.one(x), use_reentrant=True))[:, 0]
class ReentrantPair(Reentrant):
    def embed(self, batch): return self(batch["x"])[:, None]
    def compare(self, features, counted): return (features[:, 0] - features.mean()).square()
class Layered(Line):
    def __init__(self):
        super().__init__(); self.layer = Middle(); self.one = nn.Linear(4, 6); self.two = nn.Linear(6, 1)
    def forward(self, x): return self.two(self.layer(self.one(x), None))[:, 0]
    def blocks(self): return [self.layer, self.layer]
class Peeks(Layered):
    def forward(self, x): return super().forward(x) + self.layer.up.bias[0]
class Aside(Layered):
    def forward(self, x): return self.two(self.layer.forward(self.one(x), None))[:, 0]
class Nested(Layered):
    def blocks(self): return [self.layer, self.layer.up]
class NoList(Layered):
    def blocks(self): return self.layer
class Fails(Layered):
    def blocks(self): return self.layers
class Pairs(Divided):
    def sharding(self): return ["middle.up"]
class Hidden(Scaled):
    def __init__(self): super().__init__(); nn.init.zeros_(self.down.weight)
class BehindZero(Divided):
    def make(self): return Hidden()
class Word(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.table = nn.Embedding(vocabulary_size, 4); self.head = nn.Linear(4, vocabulary_size)
    def loss(self, batch):
        logits = self.head(self.table(batch["tokens"]))
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")

class Sgd:
    slots = ("momentum",)
    def __init__(self, keep=0.9): self.keep = keep
    def update(self, p, g, state, *, lr, weight_decay, step):
        state["momentum"].mul_(self.keep).add_(g); p.sub_(lr * state["momentum"])
class Whole(Sgd):
    def update(self, p, g, state, *, lr, weight_decay, step): p.sub_(lr * g / g.norm())
class NoSlots: ...

def fails(values, batch): return values["no such"]
def broken(values, batch): return values / (len(values) // 3 // 0)
def one(values, batch): return values.float().mean()
def each(values, batch): return torch.zeros(len(next(iter(batch.values()))))
def half(step, steps, to=0.5): return 1.0 - (1.0 - to) * step / steps
def negative(step, steps): return -1.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_things.py").write_text(CODE)
    (tmp_path / "a.txt").write_text("To be or not to be. " * 2000)
    monkeypatch.delitem(sys.modules, "own_things", raising=False)
    return tmp_path


def divided(model: str, **parallel: int) -> JobSpec:
    document = job(model).model_dump(mode="json", exclude_defaults=True)
    return parse(document | {"resources": {"workers": {"min": 1, "max": 4}}, "parallel": parallel})


def job(model: str = "Line", samples: str | None = "Points", **optimizer: Any) -> JobSpec:
    data: dict[str, Any] = {"samples": f"own_things:{samples}"}
    if samples is None:
        data = {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 300}, "sequence_length": 16}
    return parse(
        {
            "name": "own",
            "workload": {"model": f"own_things:{model}"},
            "data": data,
            "train": {"steps": 4, "global_batch": 4, "optimizer": optimizer},
            "checkpoint": {"export": None},
        }
    )


def refusal(spec: JobSpec) -> str:
    with pytest.raises(InputError) as error:
        check_job(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "samples", "wanted"),
    [
        (
            "Mean",
            "Points",
            "workload.model: own_things:Mean: the loss has shape () for (2,); give that of each sample",
        ),
        ("Drops", "Points", "draws random numbers in its loss"),
        ("Experts", "Points", "gets a gradient from one sample and none from another"),
        ("Norms", "Points", "one by one, so that it depends on the layout"),
        ("Counts", "Points", "its forward pass changes network.norm.running_mean"),
        ("Reads", "Points", "cannot be made with its options"),
        ("Fixed", "Points", "its loss has no gradient"),
        ("Clock", "Points", "has different initial weights each time"),
        ("Noise", "Points", "has different initial weights each time"),
        ("Named", "Points", "lr is already a column"),
        ("NoLoss", "Points", "has no loss(batch)"),
        ("Points", "Points", "is not a torch.nn.Module"),
        ("Nothing", "Points", "own_things has no Nothing"),
        ("Both", "Points", "stages() gives another loss than loss(batch); take out one of the two"),
        ("Reaches", "Points", "module 1 of stages() fails without the others ("),
        ("Integers", "Points", "stage 1 of stages() returns something other than a floating-point tensor"),
        (
            "Outside",
            "Points",
            "scale is in none of the modules of stages(); put it into the one that uses it",
        ),
        ("Foreign", "Points", "stages() gives what is not a module of the model"),
        (
            "Style",
            "Points",
            "gives middle.up the style 'columns'; choose from column, row, vocabulary, shared",
        ),
        ("Absent", "Points", "sharding() has the pattern middle.in, which matches no module"),
        ("Kind", "Points", "calls middle column, but it is a Middle; that is for an nn.Linear"),
        ("Fused", "Points", "cut over 2 ranks by sharding(), its loss is"),
        ("Unshared", "Points", "the gradient of network.middle.scale.weight differs"),
        ("Nan", "Points", "its loss on the first samples is nan"),
        ("Behind", "Points", "draws random numbers in its loss"),
        (
            "Frozen",
            "Points",
            "sets requires_grad of one.weight to False, but only train.freeze excludes parameters",
        ),
        ("Attribute", "Points", "table is neither a parameter nor a buffer; use register_buffer"),
        ("Lazy", "Points", "one.weight is lazy"),
        ("Complex", "Points", "the parameter phase is of torch.complex64"),
        ("Halves", "Points", "the parameter shift is of torch.bfloat16, but weights are kept in fp32"),
        ("Doubles", "Points", "the parameter shift is of torch.float64, but weights are kept in fp32"),
        ("Empty", "Points", "the parameter one.none of shape (0, 4) has no numbers; leave it out"),
        ("Reentrant", "Points", "its checkpoints are reentrant, which have no gradients by parameter"),
        ("ReentrantPair", "Points", "its checkpoints are reentrant, which have no gradients by parameter"),
        ("Peeks", "Points", "parameters of layer 0 of blocks() are read outside its call"),
        ("Aside", "Points", "parameters of layer 0 of blocks() are read outside its call"),
        ("Nested", "Points", "blocks() gives layer.up and also a module that contains it"),
        ("NoList", "Points", "blocks() gives a Middle; return a list of modules"),
        ("Fails", "Points", "blocks() fails (AttributeError: 'Fails' object has no attribute 'layers')"),
        ("Pairs", "Points", "sharding() gives no mapping of patterns to styles"),
        ("BehindZero", "Points", "the gradient of network.middle.scale.weight differs"),
        ("Line", "Odd", "data.samples: own_things:Odd: samples 0 and 1 differ in names or shapes"),
        ("Line", "Words", "failed on sample 0 (TypeError"),
        ("Line", "half", "cannot be made with its options"),
    ],
)
def test_what_depends_on_the_layout_is_refused(here: Path, model: str, samples: str, wanted: str) -> None:
    assert wanted in refusal(job(model, samples))


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (
            {"name": "own_things:Whole"},
            "train.optimizer.name: own_things:Whole updates a part of a parameter differently",
        ),
        ({"name": "own_things:NoSlots"}, "has no slots and update"),
        ({"name": {"use": "own_things:Sgd", "options": {"less": 1}}}, "cannot be made with its options"),
        (
            {"schedule": "own_things:negative"},
            "train.optimizer.schedule: own_things:negative gives -1.0 at update 0",
        ),
        ({"schedule": "own_things:nothing"}, "own_things has no nothing"),
        ({"name": "muon"}, "muon updates the matrices of layers, and own_things:Line names none"),
    ],
)
def test_wrong_optimisers_and_schedules_are_refused(
    here: Path, optimizer: dict[str, Any], wanted: str
) -> None:
    assert wanted in refusal(job(**optimizer))


def test_own_code_of_all_kinds_is_taken(here: Path) -> None:
    options = {"name": {"use": "own_things:Sgd", "options": {"keep": 0.5}}, "schedule": "own_things:half"}
    spec = job(**options)
    check_job(spec)
    check_job(job("Word", None))
    assert list(spec.own_code) == [f"own_things:{name}" for name in ("Line", "Points", "Sgd", "half")]
    assert parse(yaml.safe_load(dump(spec))) == spec
    rate = OptimizerSpec(lr=2.0, schedule={"use": "own_things:half", "options": {"to": 0.0}})
    assert [learning_rate(rate, step, 4) for step in (0, 2, 4)] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"workload": {"model": "gpt-tiny"}}, "data.samples are for an own model"),
        ({"workload": {"model": "own_things:Line", "objective": "causal_lm"}}, "leave one of them out"),
        ({"workload": {"model": "own_things:Line", "dropout": 0.1}}, "workload: dropout is for models of this project"),
        ({"data": {"samples": "own_things:Points", "sequence_length": 64}}, "sequence_length is for text"),
        ({"data": {"samples": "own_things:Points", "packing": "best_fit"}}, "packing is for text"),
        ({"parallel": {"engine": "deepspeed"}}, "own models are run by the torch engine"),
        ({"evaluate": {"metrics": ["perplexity"]},
          "data": {"samples": "own_things:Points", "validation": {"share": 0.5}}}, "perplexity is not a metric of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_own_code_is_refused(here: Path, change: dict[str, Any], wanted: str) -> None:
    document = job().model_dump(mode="json", exclude_defaults=True) | change
    with pytest.raises(InputError) as error:
        parse(document)
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("workload", "wanted"),
    [
        ({"adapter": {"kind": "prefix", "rank": 2}}, "prefix adapters are for models of this project"),
        ({"adapter": {"kind": "lora", "targets": "*.nothing"}}, "nothing"),
        (
            {"adapter": {"kind": "lora", "targets": "*.up", "quantize": "nf4"}},
            "bases in 4 bits are for models of",
        ),
        ({"adapter": {"kind": "lora", "targets": "*.up"}}, ""),
        ({"adapter": {"kind": "bitfit"}}, ""),
        ({"mup": {"width": 2}}, "workload: mup is for models of this project"),
    ],
)
def test_adapters_that_own_models_can_have(here: Path, workload: dict[str, Any], wanted: str) -> None:
    document = job("Divided").model_dump(mode="json", exclude_defaults=True)
    document["workload"] |= {"init_from": "runs/base", **workload}
    if not wanted:
        check_job(parse(document))
        return
    with pytest.raises(InputError) as error:
        check_job(parse(document))
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "parallel", "wanted"),
    [
        ("Line", {"tp": 2}, "an own model that declares neither stages() nor sharding() is run as it is"),
        ("Divided", {"tp": 4}, ""),
        ("Shared", {"tp": 2, "pp": 2}, ""),
        ("Divided", {"pp": 4}, "the model can be cut into 3"),
        ("Divided", {"cp": 2}, "an own model is run on whole samples"),
        ("Divided", {"tp": 3}, "tp 3 does not divide the model's 8"),
        ("Heads", {"tp": 4}, "tp 4 does not divide the model's 2 attention heads"),
    ],
)
def test_layouts_that_the_model_does_not_declare_are_refused(
    here: Path, model: str, parallel: dict[str, int], wanted: str
) -> None:
    spec = divided(model, **parallel)
    if wanted:
        assert wanted in refusal(spec)
    else:
        check_job(spec)


def test_the_planner_offers_no_engine_that_own_models_have_not(here: Path) -> None:
    spec = divided("Divided").model_copy(update={"parallel": "auto"})
    found = plan(demand_of(spec), resolve(spec).shape, 4, BOUNDLESS)
    assert {candidate.layout.engine for candidate in found.candidates} == {"torch"}


def test_a_metric_that_fails_is_refused(here: Path) -> None:
    document = job().model_dump(mode="json", exclude_defaults=True)
    document["data"]["validation"] = {"share": 0.4}
    wanted = "evaluate.metrics: own_things:fails failed (KeyError: 'no such'); its output is "
    assert wanted in refusal(parse(document | {"evaluate": {"metrics": ["loss", "own_things:fails"]}}))


@pytest.mark.parametrize(
    ("model", "objective", "metric", "wanted"),
    [
        ("gpt-tiny", "causal_lm", "broken", "own_things:broken failed (ZeroDivisionError"),
        (
            "bert-tiny",
            "masked_lm",
            "one",
            "own_things:one gives shape () for 2 samples; give a number for each",
        ),
        ("electra-tiny", "replaced_token_detection", "one", "ELECTRA has two networks' logits"),
        ("gpt-tiny", "causal_lm", "each", ""),
        ("t5-tiny", "span_corruption", "each", ""),
    ],
)
def test_a_metric_of_a_model_of_this_project_is_tried(
    model: str, objective: str, metric: str, wanted: str, here: Path
) -> None:
    document = text_job(write_text(here, 3000))
    document["workload"] = {"model": model, "objective": objective}
    document["evaluate"] = {"metrics": ["loss", f"own_things:{metric}"]}
    document["data"]["validation"] = {"share": 0.3}
    spec = parse(document)
    if wanted:
        assert wanted in refusal(spec)
    else:
        check_job(spec)


def test_what_is_frozen_by_the_job_and_a_layer_that_is_used_twice_are_taken(here: Path) -> None:
    document = job("Frozen").model_dump(mode="json", exclude_defaults=True)
    check_job(parse(document | {"train": document["train"] | {"freeze": ["network.one.*"]}}))
    check_job(job("Layered"))


def test_an_export_has_the_buffers_that_its_run_had(here: Path) -> None:
    from orchestrator.export.own_model import load_own
    from workloads.load import load
    from workloads.workload import Vocabulary

    workload: Any = load("own_things:Waves", "samples", Vocabulary(1, 0), sequence_length=1)
    with torch.device("meta"):
        trained = workload.build()
    trained.to_empty(device="cpu")
    (export := here / "export").mkdir()
    save_file(
        {n: torch.zeros(s) for n, s in ((k[8:], v) for k, v in workload.shapes.items())},
        export / "model.safetensors",
    )
    about = {
        "model": "own_things:Waves",
        "options": {},
        "code": code_of(job("Waves").own_code),
        "vocabulary_size": 1,
    }
    (export / "own.json").write_text(json.dumps(about))
    assert torch.equal(cast(Any, load_own(export)).waves, trained.network.waves)


def test_a_parameter_whose_elements_lie_in_another_order_is_held_in_order(here: Path) -> None:
    """Ranks write its parts into it by number."""
    from workloads.load import load
    from workloads.workload import Vocabulary

    workload: Any = load("own_things:Turned", "samples", Vocabulary(1, 0), sequence_length=1)
    with torch.device("meta"):
        assert all(parameter.is_contiguous() for parameter in workload.build().parameters())
    check_job(job("Turned"))


def test_own_metrics_are_of_each_sample() -> None:
    from workloads.own.rows import sample_rows

    labels = torch.tensor([[1, -100], [-100, -100]])
    assert sample_rows({"labels": labels}).tolist() == [True, False]
    assert sample_rows({"counted": torch.tensor([True, False])}).tolist() == [True, False]


def test_own_metrics_are_given_what_a_model_says_of_its_samples() -> None:
    from workloads.model.transformer import Output
    from workloads.own.metrics import OwnMetrics
    from workloads.workload import Loss

    metrics = OwnMetrics(())
    metrics._functions = {"second": lambda output, batch: output[..., 1].reshape(len(output), -1).sum(1)}
    ours, batch = torch.arange(4.0).view(2, 2), {"labels": torch.ones(2, 1, dtype=torch.long)}
    loss = Loss(torch.zeros(()), torch.ones(()))
    for output in (Output(ours, None, ours.unsqueeze(1)), Output(ours, None, sentence=ours)):
        total, count = metrics.beside(loss, output, batch).sums["second"]
        assert (float(total), float(count)) == (4.0, 2.0)
