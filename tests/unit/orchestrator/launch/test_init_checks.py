"""What a run begins with fits it, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from base_run import save_dense
from jobs import job
from tokenizers import Tokenizer, models

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.launch.init_checks import check_base
from orchestrator.resolve.resolved_job import resolve

ROWS = 40
LORA = {"adapter": {"kind": "lora", "rank": 2}}
FROZEN = {"freeze": ["tokens.*"]}


@pytest.mark.parametrize(
    ("added", "workload", "train", "wanted"),
    [
        (2, LORA, {}, "workload.adapter: hf:.* has no rows for tokens 40 to 41, and tokens.weight is not"),
        (2, {}, FROZEN, "train.freeze: hf:.* has no rows for tokens 40 to 41, and tokens.weight is not"),
        (2, {}, FROZEN | {"thaw": {2: ["tokens.*"]}}, ""),
        (2, {}, {}, ""),
        (0, LORA, FROZEN, ""),
    ],
)
def test_rows_that_begin_anew_are_trained(
    tmp_path: Path, added: int, workload: dict[str, Any], train: dict[str, Any], wanted: str
) -> None:
    made = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0} | {f"w{n}": n for n in range(1, ROWS)}, unk_token="w1")
    )
    made.add_special_tokens(["<|endoftext|>"])
    made.add_tokens([f"<new-{n}>" for n in range(added)])
    folder = save_dense(tmp_path / "base", ROWS)
    made.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    document = job("a.txt", steps=4, **train)
    document["workload"] = {"model": f"hf:{folder}", **workload}
    document["data"] |= {"tokenizer": folder}
    if not wanted:
        return check_base(resolve(parse(document)), None)
    with pytest.raises(InputError, match=wanted) as error:
        check_base(resolve(parse(document)), None)
    assert "train a base that has them first" in str(error.value)
    return None


@pytest.mark.parametrize("key", ["model", "init_from"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.fp16.safetensors", r"has weights in model\.fp16\.safetensors, which is not read here"),
        (
            "adapter_config.json",
            "is an adapter of peft for base, and a model is read whole here; merge both with",
        ),
    ],
)
def test_weights_that_are_not_read_are_not_passed_over(
    tmp_path: Path, name: str, says: str, key: str
) -> None:
    folder = Path(save_dense(tmp_path / "base", ROWS))
    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a")).save(f"{folder}/tokenizer.json")
    document = job("a.txt", steps=4)
    document["workload"] = (
        {"model": f"hf:{folder}"} if key == "model" else {"model": "gpt-tiny", key: str(folder)}
    )
    document["data"] |= {"tokenizer": str(folder)}
    resolved = resolve(parse(document))
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(
        '{"base_model_name_or_path": "base", "peft_type": "LORA", "task_type": "CAUSAL_LM"}'
    )
    with pytest.raises(InputError, match=f"workload.{key}.*{says}"):
        check_base(resolved, None)
