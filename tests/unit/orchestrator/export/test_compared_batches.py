"""What of the prepared data an export is compared with transformers on."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.records import RecordKind
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import Tokens
from orchestrator.export.hugging_face import _record_batches
from workloads.load import load
from workloads.workload import Vocabulary

LABELS = ("bad", "good")
SMALL = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "max_positions": 16}


def test_records_are_of_the_largest_source_wherever_it_stands(tmp_path: Path) -> None:
    """A run over two tables trained to its end, and then had no export."""
    named = []
    for name, count in (("small", 1), ("large", 30)):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"t": f"a {name} film {'good ' * (n % 5)}", "l": LABELS[n % 2]} for n in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        named.append(Source(uri=str(path), field={"text": "t", "label": "l"}))
    folder = DataFolder(str(tmp_path / "prepared"))
    text = train_bytes(["a small film, a large film, good and bad"] * 20, 280, ["[CLS]", "[SEP]", "[PAD]"])
    folder.write("tokenizer.json", text.encode())
    roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
    written = shards.TokenFormat(280, roles, 4, RecordKind("sequence_classification", LABELS))
    parts = sources.cut(sources.resolve(named), 2**20)
    for number, part in enumerate(parts):
        shards.make_shard(folder.uri, number, part, written)()
    manifest.write(folder, gather(folder, "f" * 32, [each.uri for each in named], parts, written))
    vocabulary = Vocabulary(280, eos=0, pad=3, cls=1, sep=2)
    changes = SMALL | {"vocab_size": 280}
    workload = load(
        "bert-tiny", "sequence_classification", vocabulary, changes=changes, sequence_length=16, labels=LABELS
    )
    tokens = Tokens.open(folder.uri)
    assert tokens.length(1) > tokens.length(0)
    first, *_ = _record_batches(tokens, workload.objective, workload)
    assert first["tokens"].shape[0] == 4
    said = tokens.tokenizer().decode([int(token) for token in first["tokens"][0]])
    assert "large" in said
