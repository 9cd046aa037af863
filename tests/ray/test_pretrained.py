"""A run on Ray from a Hugging Face folder: which of its processes imports what."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from jobs import slow_job, started, status, wait_for, write_job
from letters import WORDS, letters, write_tokenizer


@pytest.mark.slow
def test_a_controller_leaves_the_folder_to_the_process_with_the_imports_of_ranks(tmp_path: Path) -> None:
    """Its own import of torch and transformers would delay the first step by seconds."""
    import transformers as hf

    folder = tmp_path / "base"
    folder.mkdir()
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    hf.BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, template=False)
    rows = ({"text": letters(number), "label": "ab"[number % 2]} for number in range(200))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = slow_job("", steps=4000)
    document["workload"] = {"model": f"hf:{folder}", "objective": "sequence_classification"}
    document["data"] |= {
        "sources": [{"uri": str(tmp_path / "rows.jsonl"), "field": {"text": "text", "label": "label"}}],
        "labels": ["a", "b"],
        "tokenizer": str(folder),
        "sequence_length": 16,
    }
    path, run = write_job(tmp_path, document), tmp_path / "runs" / document["name"]
    with started("run", path, cwd=tmp_path) as process:
        wait_for(lambda: status(run).get("step", 0) >= 2, "some steps", 180)
        maps = Path(f"/proc/{status(run)['pid']}/maps").read_text()
        assert "/tokenizers" in maps
        assert "/torch/lib/" not in maps
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("pretrained_rank" in word for child in family for word in child.cmdline())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 3, (tmp_path / "output.txt").read_text()
