"""Exports as transformers 4 reads them: the same logits as ours, of every family and of classes that are run as is."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from workloads.hf.check.compare import load as load_here
from workloads.hf.check.parity_table import CASES, LENGTH, VOCABULARY, Case, random_state
from workloads.hf.files.older_form import write_both_forms
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

FAR = 1_000_000.0
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": FAR}
DEFAULT = {"rope_type": "default", "rope_theta": FAR}
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0,
         "eos_token_id": 2}  # fmt: skip
KEYS = SIZES | {"num_key_value_heads": 2}
NEAR_AND_FAR = {"full_attention": DEFAULT, "sliding_attention": DEFAULT | {"rope_theta": 500.0}}
CLASSES = {
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}),
    "stablelm": transformers.StableLmConfig(**KEYS, rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}),
    "phi": transformers.PhiConfig(**KEYS, rope_parameters=LINEAR | {"partial_rotary_factor": 0.5}),
    "cohere": transformers.CohereConfig(**KEYS, rope_parameters=LINEAR),
    "granite": transformers.GraniteConfig(**KEYS, rope_parameters=DEFAULT),
    "falcon": transformers.FalconConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, alibi=False, rope_parameters=DEFAULT
    ),
    "modernbert": transformers.ModernBertConfig(**SIZES, rope_parameters=NEAR_AND_FAR, cls_token_id=3, sep_token_id=4),
    "smollm3": transformers.SmolLM3Config(**KEYS, rope_parameters=DEFAULT),
    "phi3": transformers.Phi3Config(**KEYS, original_max_position_embeddings=32, rope_parameters={
        "rope_type": "longrope", "rope_theta": FAR, "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }),
}  # fmt: skip
"""Classes with rotary positions that have no conversion table here, or a configuration that it cannot express."""

READS = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file, save_file

assert transformers.__version__.startswith("4."), transformers.__version__
transformers.logging.set_verbosity_error()
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    try:
        model = getattr(transformers, config["architectures"][0]).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"  # the fused one has no soft caps
        )
        with torch.no_grad():
            output = model.eval()(**load_file(folder / "inputs"))
        logits = next(output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output)
        save_file({"logits": logits.contiguous()}, folder / "logits-of-4")
    except Exception as error:
        (folder / "error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the newest transformers 4, which has all else from this one."""
    place = tmp_path_factory.mktemp("older") / "venv"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(place)], check=True)
    python = str(place / "bin" / "python")
    wanted = ["transformers<5", "tokenizers<0.23", "huggingface_hub<1"]
    made = subprocess.run(
        [*uv, "pip", "install", "-q", "--no-deps", "--python", python, *wanted], check=False
    )
    if made.returncode:
        pytest.skip("transformers 4 cannot be installed here")
    (site,) = (place / "lib").glob("python*/site-packages")
    (site / "zz_rest.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # after its own
    return python


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(6, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens.flip(1).contiguous()
    return given


def prepared(folder: Path) -> None:
    """Leave beside an export what it is asked, and what the present transformers answers."""
    model = load_here(str(folder), strict=False)
    given = inputs_of(model)
    save_file(given, folder / "inputs")
    with torch.no_grad():
        output = model(**given)
    names = ("logits", "prediction_logits", "last_hidden_state")
    logits = next(output[name] for name in names if name in output)
    save_file({"logits": logits.contiguous()}, folder / "logits-of-5")


INEXPRESSIBLE = ("classes", "untied", "mT5, tied")
"""Titles of cases that are of other heads, or of no model that version 4 has: mT5's is scaled where it is tied."""


def far(case: Case) -> Case:
    """The case with another base than 10,000, where it has rotary positions; version 4 has the clamp of gpt-oss that
    was published, whatever the configuration says."""
    more: dict[str, Any] = {"swiglu_limit": 7.0} if case.title.startswith("gpt-oss") else {}
    more |= {"rope_theta": FAR} if getattr(case.config, "positions", "") == "rotary" else {}
    return Case(case.title, case.model, {**case.changes, **more}, case.inputs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_4_computes_what_5_does(older: str, tmp_path: Path) -> None:
    bodies = [case for case in CASES if not any(words in case.title for words in INEXPRESSIBLE)]
    for number, case in enumerate(map(far, bodies)):
        workload = TransformerWorkload(case.model, case.config, None, VOCABULARY)
        folder = tmp_path / f"{number} {case.title}"
        workload.to_hf(random_state(workload).__getitem__, str(folder))
        prepared(folder)
    for name, config in CLASSES.items():
        torch.manual_seed(0)
        plain = tmp_path / "plain" / name
        kind = (
            transformers.AutoModelForMaskedLM if name == "modernbert" else transformers.AutoModelForCausalLM
        )
        kind.from_config(config).save_pretrained(plain)
        objective = "masked_lm" if name == "modernbert" else "causal_lm"
        workload = load(
            f"hf:{plain}", objective, Vocabulary(97, 2, pad=1, cls=3, sep=4, mask=5), sequence_length=16
        )
        workload.to_hf(lambda n, w=workload: w.initial(n, 0), str(tmp_path / name))
        prepared(tmp_path / name)
    folders = [path for path in sorted(tmp_path.iterdir()) if (path / "inputs").exists()]
    subprocess.run([older, "-c", READS, *map(str, folders)], check=True)
    apart = {}
    for folder in folders:
        if (folder / "error").exists():
            apart[folder.name] = (folder / "error").read_text()
            continue
        found, wanted = (load_file(folder / f"logits-of-{number}")["logits"] for number in (4, 5))
        difference = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not difference < 1e-4:
            apart[folder.name] = f"differs by {difference:.1e}"
    assert apart == {}


def test_both_forms_are_written(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**KEYS, rope_parameters=LINEAR)
    config.save_pretrained(tmp_path)
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text()), (
        "transformers writes both now"
    )
    write_both_forms(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == FAR
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt_neox", {"rotary_emb_base": FAR, "rotary_pct": 0.5, "rope_scaling": None}),
        ("modernbert", {"global_rope_theta": FAR, "local_rope_theta": 500.0, "rope_scaling": None}),
        ("phi", {"rope_theta": FAR, "partial_rotary_factor": 0.5}),
        ("phi3", {"rope_theta": FAR, "original_max_position_embeddings": 32}),
    ],
)
def test_a_class_with_names_of_its_own_has_them(name: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    CLASSES[name].save_pretrained(tmp_path)
    write_both_forms(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in wanted} == wanted
    found = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert {k: v for k, v in found.items() if k != "type"} == CLASSES[name].rope_parameters


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("T5", {"tie_word_embeddings": True}),
        ("T5 1.1", {"tie_word_embeddings": False}),
        ("mT5", {"tie_word_embeddings": False}),
        ("mT5, tied", {"tie_word_embeddings": True}),
        ("Qwen3-MoE", {"num_experts": 4}),
    ],
)
def test_an_export_says_what_transformers_4_asks_for(
    title: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.title == title)
    workload = TransformerWorkload(case.model, case.config, None, VOCABULARY)
    workload.to_hf(random_state(workload).__getitem__, str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in wanted} == wanted


def test_a_configuration_without_rotary_positions_stays(tmp_path: Path) -> None:
    transformers.BertConfig().save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    write_both_forms(str(tmp_path))
    assert (tmp_path / "config.json").read_text() == before


def test_a_configuration_that_cannot_hold_both_forms_stays(tmp_path: Path) -> None:
    """Gemma 4's layers have rotary positions of two kinds, and its class rejects a scaling for all layers."""
    config = transformers.Gemma4TextConfig(**KEYS, layer_types=["sliding_attention", "full_attention"])
    config.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    write_both_forms(str(tmp_path))
    assert (tmp_path / "config.json").read_text() == before
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
