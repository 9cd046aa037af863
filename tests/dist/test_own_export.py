"""An own model leaves whole: a process that has neither this project nor the user's folder loads and continues it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from local_run import LocalGang, drive_here
from safetensors.torch import save_file

from orchestrator.api.run import load_run
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.evaluate.speaker import speaker_of_export
from orchestrator.export.hugging_face import export
from orchestrator.export.own_model import load_own
from orchestrator.launch.preflight import preflight
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir
from workloads.workload import Sampling

MODEL = '''
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
from torch import nn
from torch.nn import functional as F
import leaving_layers
from leaving_layers import Block
if TYPE_CHECKING:
    from workloads.workload import Batch

class Model(nn.Module):
    """Its head is its table, and a buffer is in no checkpoint."""
    def __init__(self, vocabulary_size, width=16):
        super().__init__()
        self.table = nn.Embedding(vocabulary_size, width)
        self.layers = nn.ModuleList([Block(width), leaving_layers.Block(width)])
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.rand(width) + 0.5, persistent=False)
    def logits(self, batch: Batch):
        x = self.table(batch["tokens"]) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
    def loss(self, batch: Batch):
        return F.cross_entropy(self.logits(batch).transpose(1, 2), batch["labels"], reduction="none")
'''
LAYERS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
    def forward(self, x):
        length = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.second(torch.tanh(self.first(x.cumsum(1) / length)))
"""
READER = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from safetensors.torch import load_file, save_file

folder, place = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
rows = load_file(place + "/in.safetensors")["rows"]
found = model(input_ids=rows, labels=rows)
padded = torch.cat([rows.new_zeros(len(rows), 2), rows], 1)
mask = (torch.arange(padded.shape[1]) >= 2).long().expand_as(padded)
beside = model(input_ids=padded, attention_mask=mask).logits[:, 2:]
inputs = tokenizer("The", return_tensors="pt", add_special_tokens=False)
said = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1]:]
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(place + "/again")
again = AutoModelForCausalLM.from_pretrained(place + "/again", trust_remote_code=True)
assert torch.equal(again(input_ids=rows).logits, found.logits)
assert base.network.head.weight is base.network.table.weight
assert not {"orchestrator", "workloads", "leaving", "leaving_layers"} & set(sys.modules)
out = {"logits": found.logits, "padded": beside.contiguous(), "loss": found.loss.reshape(1)}
save_file(out, place + "/out.safetensors")
print(json.dumps(tokenizer.decode(said, skip_special_tokens=True)))
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("leaving", "leaving_layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "leaving.py").write_text(MODEL)
    (tmp_path / "leaving_layers.py").write_text(LAYERS)
    document = job(write_text(tmp_path / "corpus", 20_000), steps=4)
    document["workload"] = {"model": "leaving:Model", "objective": "causal_lm", "changes": {"width": 8}}
    document["data"] |= {"tokenizer": {"train_bpe": 301}}
    document["checkpoint"] = {"every": 4, "export": "hf"}
    preflight(parse(document), RunDir(str(tmp_path / "run")), None, None)
    document["checkpoint"]["export"] = None
    drive_here(document, str(tmp_path / "run"), tmp_path / "cache", gang=lambda: LocalGang([1]))
    return tmp_path


@pytest.mark.slow
def test_a_stranger_reads_and_continues_it(trained: Path) -> None:
    found = export(str(trained / "run"), 4, str(trained / "export"), form="hf")
    assert found["logits_difference"] < 1e-5
    commit = model_of_run(str(trained / "run"), 4)
    ours: Any = load_run(trained / "run").model()
    assert torch.equal(ours.table.weight, load_own(trained / "export").table.weight)  # type: ignore[union-attr, arg-type]
    rows = torch.arange(24).reshape(2, 12) % 300
    (elsewhere := trained / "elsewhere").mkdir()
    save_file({"rows": rows}, elsewhere / "in.safetensors")
    (elsewhere / "read.py").write_text(READER)
    done = subprocess.run(
        [sys.executable, "-P", "read.py", str(trained / "export"), str(elsewhere)],
        cwd=elsewhere, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    out = load_file(elsewhere / "out.safetensors")
    with torch.inference_mode():
        logits = ours.logits({"tokens": rows})
    assert torch.equal(out["logits"], logits)
    assert torch.allclose(out["padded"], logits, atol=1e-6)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert float(out["loss"]) == pytest.approx(float(loss), rel=1e-5)
    said = continue_prompts(commit.workload, commit.read, commit.tokens.tokenizer(), ["The"], 12)
    assert json.loads(done.stdout.splitlines()[-1]) == said[0]
    speaker = speaker_of_export(str(trained / "export"))
    pieces: list[str] = []
    answer = speaker.say(speaker.frame("The"), 12, Sampling(), pieces.append)
    assert (answer.text, "".join(pieces)) == (said[0], said[0])


def test_code_that_cannot_travel_is_one_line_before_the_run(trained: Path) -> None:
    (trained / "leaving_part").mkdir()
    (trained / "leaving_part" / "x.py").write_text("")
    (trained / "leaving.py").write_text(
        "import leaving_part.x\n" + MODEL.replace("from __future__ import annotations", "")
    )
    document = job(str(trained / "corpus" / "topics.txt"))
    document["workload"] = {"model": "leaving:Model", "objective": "causal_lm", "changes": {"width": 8}}
    document["checkpoint"] = {"every": 4, "export": "hf"}
    with pytest.raises(
        InputError, match=r"checkpoint.export: leaving has `import leaving_part.x`, which cannot travel"
    ):
        preflight(parse(document), RunDir(str(trained / "other")), None, None)
