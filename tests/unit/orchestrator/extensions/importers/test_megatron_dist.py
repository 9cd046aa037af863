"""Distributed checkpoints as Megatron-Core lays them out come back as the model that they were made of."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from orchestrator.config.errors import InputError
from orchestrator.extensions.importers import megatron, megatron_unpickle
from orchestrator.extensions.importers.megatron import import_megatron

HEADS, GROUPS, SIZE, HIDDEN, LAYERS, FEEDFORWARD, VOCABULARY, PADDED = 4, 2, 8, 32, 3, 48, 97, 104


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read in this process, which takes less time than one of its own."""

    def ask(_: str, asked: dict[str, Any]) -> dict[str, Any]:
        answer = megatron_unpickle.answer(asked)
        if "refused" in answer:
            raise InputError(answer["refused"], asked["folder"], "")
        return answer

    if "apart" not in request.node.name:
        monkeypatch.setattr(megatron, "ask", ask)


def noisy(model: Any) -> Any:
    """Biases and norms that tell whether they were lost."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=24, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=FEEDFORWARD,
        activation_function="gelu_new",
    )  # fmt: skip
    return noisy(transformers.GPT2LMHeadModel(config))


def llama() -> Any:
    torch.manual_seed(1)
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=24, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, intermediate_size=FEEDFORWARD, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    return noisy(transformers.LlamaForCausalLM(config))


def by_group(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rows as Megatron-Core has them: of each group its queries, then its key and its value."""
    groups = len(key) // SIZE
    rows = (query.view(groups, -1, *query.shape[1:]), key.view(groups, SIZE, *key.shape[1:]),
            value.view(groups, SIZE, *value.shape[1:]))  # fmt: skip
    return torch.cat(rows, 1).flatten(0, 1)


def layer_of(block: Any) -> dict[str, Tensor]:
    """A layer's tensors by Megatron-Core's names."""
    if isinstance(block, transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        at, mlp = block.self_attn, block.mlp
        return {
            "self_attention.linear_qkv.weight": by_group(
                at.q_proj.weight, at.k_proj.weight, at.v_proj.weight
            ),
            "self_attention.linear_proj.weight": at.o_proj.weight,
            "mlp.linear_fc1.weight": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            "mlp.linear_fc2.weight": mlp.down_proj.weight,
            "self_attention.linear_qkv.layer_norm_weight": block.input_layernorm.weight,
            "mlp.linear_fc1.layer_norm_weight": block.post_attention_layernorm.weight,
        }
    found = {}
    for leaf in ("weight", "bias"):
        turned = (lambda t: t.T) if leaf == "weight" else (lambda t: t)
        for name, module in (("self_attention.linear_proj", block.attn.c_proj), ("mlp.linear_fc1", block.mlp.c_fc),
                             ("mlp.linear_fc2", block.mlp.c_proj)):  # fmt: skip
            found[f"{name}.{leaf}"] = turned(getattr(module, leaf))
        parts = turned(getattr(block.attn.c_attn, leaf)).split(HIDDEN)
        found[f"self_attention.linear_qkv.{leaf}"] = by_group(*parts)
        found[f"self_attention.linear_qkv.layer_norm_{leaf}"] = getattr(block.ln_1, leaf)
        found[f"mlp.linear_fc1.layer_norm_{leaf}"] = getattr(block.ln_2, leaf)
    return found


def tensors_of(model: Any, stacked: bool = True) -> dict[str, Tensor]:
    """The model by Megatron-Core's names in a distributed checkpoint."""
    is_llama = isinstance(model, transformers.LlamaForCausalLM)
    body, blocks = (model.model, model.model.layers) if is_llama else (model.transformer, model.transformer.h)
    final = body.norm if is_llama else body.ln_f

    def padded(table: Tensor) -> Tensor:
        return torch.cat((table, torch.ones(PADDED - len(table), table.shape[1])))

    found = {f"decoder.final_layernorm.{leaf}": tensor for leaf, tensor in final.named_parameters()}
    found["embedding.word_embeddings.weight"] = padded((body.embed_tokens if is_llama else body.wte).weight)
    if is_llama:
        found["output_layer.weight"] = padded(model.lm_head.weight)
    else:
        found["embedding.position_embeddings.weight"] = body.wpe.weight
    layers = [layer_of(block) for block in blocks]
    for name in layers[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([each[name] for each in layers])
        else:
            found |= {f"decoder.layers.{n}.{name}": each[name] for n, each in enumerate(layers)}
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def save(folder: Path, model: Any, tensors: dict[str, Tensor], **more: Any) -> Path:
    """What Megatron-LM writes: the tensors, optimiser state and objects of ranks, options, and its format."""
    is_llama = isinstance(model, transformers.LlamaForCausalLM)
    place = folder / "iter_0000100"
    beside = {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.zeros(2, 3),
        "chained_0.optimizer.state.fp32_param.embedding.word_embeddings.weight": torch.zeros(2),
        "rng_state/shard_0_1": io.BytesIO(b"state"),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": io.BytesIO(b"state"),
    }
    dcp.save({**tensors, **beside}, checkpoint_id=place, no_dist=True)
    planned(place)
    args: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": FEEDFORWARD,
        "max_position_embeddings": 24, "norm_epsilon": 1e-5, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2, "bias_gelu_fusion": True,
    }  # fmt: skip
    if is_llama:
        args |= {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
                 "add_bias_linear": False, "group_query_attention": True, "num_query_groups": GROUPS,
                 "untie_embeddings_and_output_weights": True, "rotary_base": 5000}  # fmt: skip
    stored = {"args": argparse.Namespace(**(args | more)), "iteration": 100, "checkpoint_version": 3.0}
    torch.save(stored, place / "common.pt")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (place / "metadata.json").write_text(json.dumps(about))
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def planned(place: Path) -> None:
    """Megatron-Core keeps the plans of its ranks in the metadata."""
    path = place / ".metadata"
    found = pickle.loads(path.read_bytes())
    index, chunk = next((i, t.chunks[0]) for i, t in (
        (i, found.state_dict_metadata[i.fqn]) for i in found.storage_data if i.offset is not None))  # fmt: skip
    tensor = found.state_dict_metadata[index.fqn]
    written = TensorWriteData(chunk, tensor.properties, tensor.size)
    found.all_local_plans = [SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=written)])]
    path.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize(("kind", "stacked"), [(gpt2, True), (llama, True), (llama, False)])
def test_a_distributed_checkpoint_comes_back_as_the_model(kind: Any, stacked: bool, tmp_path: Path) -> None:
    model = kind()
    source = save(tmp_path / "theirs", model, tensors_of(model, stacked))
    about = import_megatron(str(source), str(tmp_path / "ours"), vocabulary=VOCABULARY)
    assert (about["tensor_parallel"], about["pipeline_parallel"], about["iteration"]) == (2, 3, 100)
    found = type(model).from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    wanted = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    tokens = torch.arange(20)[None] % VOCABULARY
    assert torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.slow
def test_another_process_apart_reads_it(tmp_path: Path) -> None:
    model = llama()
    source = save(tmp_path / "theirs", model, tensors_of(model))
    about = import_megatron(str(source / "iter_0000100"), str(tmp_path / "ours"))
    assert about["tensors"]["lm_head.weight"] == [PADDED, HIDDEN]


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (without("decoder.layers.mlp.linear_fc2.weight"), "layers.0.down.weight is missing"),
        (without("output_layer.weight"), "head is missing"),
        (lambda t: t.update({"decoder.layers.mlp.router.weight": torch.zeros(LAYERS, 4, 4)}), "would be lost"),
        (lambda t: t.update({"decoder.layers.mlp.linear_fc1.weight_w": torch.zeros(LAYERS, 4)}), "would be lost"),
        (lambda t: t.update({"vision.weight": torch.zeros(4)}), "vision.weight is not a tensor of GPT"),
        (lambda t: t.update({"decoder.layers.final_layernorm.weight": torch.zeros(LAYERS, 4)}), "would be lost"),
        (lambda t: t.update({"decoder.layers.1.mlp.linear_fc2.weight": torch.zeros(4)}), "is stored under two names"),
        (lambda t: t.update({"decoder.layers.mlp.linear_fc2.weight": torch.zeros(LAYERS + 1, 4, 4)}),
         r"is \[4, 4, 4\], but its options say 3 layers"),
        (lambda t: t.update({"decoder.layers.mlp.linear_fc2.bias": torch.zeros(LAYERS, HIDDEN)}),
         "layers.0.down.bias .* has no place"),
        (lambda t: t.update({"output_layer.weight": torch.zeros(PADDED, HIDDEN, dtype=torch.long)}),
         "is not a plain tensor of real numbers"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_missing_is_refused(edit: Any, wanted: str, tmp_path: Path) -> None:
    model = llama()
    tensors = tensors_of(model)
    edit(tensors)
    with pytest.raises(InputError, match=wanted) as error:
        import_megatron(str(save(tmp_path / "theirs", model, tensors)), str(tmp_path / "ours"))
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["theirs"]


class Bomb:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch bombed",)


def test_other_formats_and_files_that_are_made_to_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = llama()
    whole = save(tmp_path / "theirs", model, tensors_of(model))

    def refused(wanted: str, edit: Callable[[Path], Any]) -> None:
        source = tmp_path / "edited"
        shutil.copytree(whole, source)
        edit(source / "iter_0000100")
        with pytest.raises(InputError, match=wanted):
            import_megatron(str(source), str(tmp_path / "ours"))
        shutil.rmtree(source)

    zarr = json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    refused("has the format zarr version 1", lambda f: (f / "metadata.json").write_text(zarr))
    refused("does not state its format", lambda f: (f / "metadata.json").write_text("{}"))
    refused("there is no checkpoint of Megatron-LM", lambda f: (f / "common.pt").unlink())
    refused("holds no options", lambda f: torch.save({"iteration": 1}, f / "common.pt"))
    refused(r"asks for (posix|nt)\.system", lambda f: torch.save({"args": Bomb()}, f / "common.pt"))
    refused(r"asks for (posix|nt)\.system", lambda f: (f / ".metadata").write_bytes(pickle.dumps(Bomb())))
    refused("cannot be read|more numbers than", lambda f: (f / "__0_0.distcp").write_bytes(b"few"))
    refused("lacks a part|cannot be read", lambda f: (f / "__0_0.distcp").rename(f / "__9_0.distcp"))
    refused("num_experts 8 is imported from the format torch, not", lambda f: told(f, num_experts=8))
    refused("version 1.0, which is older than Megatron-Core", lambda f: told(f, version=1.0))
    assert sorted(os.listdir(tmp_path)) == ["theirs"]


def told(folder: Path, version: float = 3.0, **more: Any) -> None:
    """Change what the options say."""
    stored = torch.load(folder / "common.pt", weights_only=False)
    vars(stored["args"]).update(more)
    torch.save({**stored, "checkpoint_version": version}, folder / "common.pt")
