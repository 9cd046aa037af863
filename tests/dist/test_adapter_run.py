"""A run that trains an adapter: it survives, its commits have the adapter alone, and both exports are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from base_run import STEPS, document, run_base
from jobs import curve, weights, write_text
from local_run import drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.export.hugging_face import export
from orchestrator.launch.init_checks import check_base
from orchestrator.launch.job_checks import check_job
from orchestrator.resolve.commit_model import model_of_run

ADAPTER = {"kind": "dora", "rank": 4, "targets": ["*.attention.*", "*.down"]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def base(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_base(text, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_kill_changes_no_bit_and_exports_are_read_back(
    quantize: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    monkeypatch.setattr(decide, "SETTLE", 0.0)
    cache = Path(text).parent / "cache"
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 64}
    base = run_base(text, tmp_path, model="qwen3-tiny", changes=sizes)
    export(str(base), STEPS, str(tmp_path / "export"))
    tuned = document(
        text, model=f"hf:{tmp_path / 'export'}", changes={}, adapter=ADAPTER | {"quantize": quantize}
    )
    tuned["checkpoint"]["average"] = {"ema": 0.5}
    drive_here(tuned, str(tmp_path / "quiet"), cache)
    drive_here(tuned, str(tmp_path / "killed"), cache, faults=("kill@1:5",))
    assert curve(tmp_path / "quiet") == curve(tmp_path / "killed")
    kept = weights(tmp_path / "quiet", STEPS)
    assert kept == weights(tmp_path / "killed", STEPS)
    ends = ("lora_a.weight", "lora_b.weight", "magnitude.weight")
    assert all(name.endswith(ends) for name in kept if name.startswith(("model.", "average.")))
    full = Store(str(base / "checkpoints")).manifest(STEPS).total_bytes
    assert Store(str(tmp_path / "quiet" / "checkpoints")).manifest(STEPS).total_bytes < full / 3
    export(str(tmp_path / "quiet"), STEPS, str(tmp_path / "merged"))
    export(str(tmp_path / "quiet"), STEPS, str(tmp_path / "adapter"), form="adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    in_4_bits = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if quantize == "nf4" else None
    )
    plain = AutoModelForCausalLM.from_pretrained(named, quantization_config=in_4_bits, dtype=torch.float32)
    if in_4_bits:
        plain.dequantize()  # on a CPU bitsandbytes computes in bf16 where there is no gradient
    onto = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    tokens = torch.arange(6, 38)[None]
    with torch.no_grad():
        ours, theirs = merged(tokens).logits, onto(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_another_run_goes_on_from_the_base_alone(text: str, base: Path, tmp_path: Path) -> None:
    cache = Path(text).parent / "cache"
    tuned = document(text, init_from=str(base), adapter={"kind": "lora", "rank": 2})
    drive_here(tuned, str(tmp_path / "run"), cache)
    assert model_of_run(str(tmp_path / "run"), STEPS).workload.adapter is not None
    with pytest.raises(InputError, match="was trained with an adapter"):
        check_base(check_job(parse(document(text, init_from=str(tmp_path / "run")))), None)


@pytest.mark.parametrize(
    ("adapter", "where", "told"),
    [
        (
            {"kind": "lora", "targets": "*.atention.*"},
            "workload.adapter.targets",
            r"no linear layer; the nearest are ",
        ),
        ({"kind": "lora", "rank": 0}, "workload.adapter.rank", "greater than or equal to 1"),
        ({"kind": "ia3"}, "workload.adapter.kind", "'lora', 'rslora'"),
        (
            {"kind": "qlora"},
            "workload.adapter.kind",
            "qlora is not supported: set kind to lora, and quantize",
        ),
        (
            {"kind": "lora", "quantize": "nf4"},
            "workload.adapter.quantize",
            "has 32 inputs, and weights in 4 bits",
        ),
        ({"kind": "bitfit", "rank": 4}, "workload.adapter", "bitfit has no rank"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_one_line(
    text: str, base: Path, adapter: dict[str, Any], where: str, told: str
) -> None:
    with pytest.raises(InputError, match=told) as error:
        check_job(parse(document(text, init_from=str(base), adapter=adapter)))
    assert where in str(error.value)


def test_an_adapter_without_a_base_is_refused(text: str, base: Path, tmp_path: Path) -> None:
    adapter = {"kind": "lora"}
    with pytest.raises(InputError, match="gpt-tiny starts from random values"):
        parse(document(text, adapter=adapter))
    with pytest.raises(InputError, match="dpo compares with the base"):
        parse(document(text, init_from="run", objective="dpo", adapter={"kind": "prefix"}))
    bare = tmp_path / "bare"
    export(str(base), STEPS, str(bare))
    (bare / "model.safetensors").unlink()
    spec = parse(document(text, model=f"hf:{bare}", changes={}, adapter=adapter))
    with pytest.raises(InputError, match="has no weights, which an adapter needs"):
        check_base(check_job(spec), None)
    with pytest.raises(InputError, match="has no commit"):
        check_base(check_job(parse(document(text, init_from=str(tmp_path / "no"), adapter=adapter))), None)
