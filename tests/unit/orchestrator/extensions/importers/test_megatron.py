"""Shards written as Megatron-LM lays them out come back as the model that they were cut from."""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.config.errors import InputError
from orchestrator.extensions.importers import megatron, megatron_unpickle
from orchestrator.extensions.importers.megatron import import_megatron
from workloads.load import load
from workloads.workload import Vocabulary

HEADS, GROUPS, SIZE, HIDDEN, LAYERS, FEEDFORWARD, VOCABULARY, PADDED = 4, 2, 8, 32, 4, 48, 97, 104


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


def noisy(model: Any) -> Any:
    """Biases and norms that tell whether they were lost."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def rows(parts: list[Tensor], version: float) -> Tensor:
    """The fused rows of a rank, head by head."""
    query, key, value = parts
    groups = len(key) // SIZE
    per = len(query) // len(key)
    if version < 1.0:
        return torch.cat((query, key, value))
    found = []
    for group in range(groups):
        of_group = slice(group * SIZE, (group + 1) * SIZE)
        queries = query[group * per * SIZE : (group + 1) * per * SIZE]
        if version >= 2.0:
            found += [queries, key[of_group], value[of_group]]
        else:
            found += [one for at in range(SIZE) for one in (queries[at : at + 1], key[of_group][at : at + 1],
                                                            value[of_group][at : at + 1])]  # fmt: skip
    return torch.cat(found)


def cut(tensor: Tensor, dim: int, ways: int, index: int) -> Tensor:
    return tensor.chunk(ways, dim)[index].clone()


def padded(table: Tensor) -> Tensor:
    return torch.cat((table, torch.ones(PADDED - len(table), table.shape[1])))


def layer_of_gpt2(block: Any, ways: int, tp: int, version: float) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for leaf in ("weight", "bias"):

        def plain(module: Any, leaf: str = leaf) -> Tensor:
            tensor: Tensor = getattr(module, leaf)
            return tensor.T if leaf == "weight" else tensor

        parts = [cut(part, 0, ways, tp) for part in plain(block.attn.c_attn).split(HIDDEN)]
        found[f"self_attention.query_key_value.{leaf}"] = rows(parts, version)
        found[f"mlp.dense_h_to_4h.{leaf}"] = cut(plain(block.mlp.c_fc), 0, ways, tp)
        for name, module in (
            ("self_attention.dense", block.attn.c_proj),
            ("mlp.dense_4h_to_h", block.mlp.c_proj),
        ):
            tensor = plain(module)
            found[f"{name}.{leaf}"] = cut(tensor, 1, ways, tp) if leaf == "weight" else tensor
        found[f"input_layernorm.{leaf}"] = getattr(block.ln_1, leaf)
        found[f"post_attention_layernorm.{leaf}"] = getattr(block.ln_2, leaf)
    return found


def layer_of_llama(block: Any, ways: int, tp: int, core: bool) -> dict[str, Tensor]:
    attention, mlp = block.self_attn, block.mlp
    parts = [cut(p.weight, 0, ways, tp) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    qkv, out = ("linear_qkv", "linear_proj") if core else ("query_key_value", "dense")
    up, down = ("linear_fc1", "linear_fc2") if core else ("dense_h_to_4h", "dense_4h_to_h")
    gated = torch.cat([cut(p.weight, 0, ways, tp) for p in (mlp.gate_proj, mlp.up_proj)])
    norms = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if core
        else ("input_norm.weight", "post_attention_norm.weight")
    )
    return {
        f"self_attention.{qkv}.weight": rows(parts, 3.0),
        f"self_attention.{out}.weight": cut(attention.o_proj.weight, 1, ways, tp),
        f"mlp.{up}.weight": gated,
        f"mlp.{down}.weight": cut(mlp.down_proj.weight, 1, ways, tp),
        norms[0]: block.input_layernorm.weight,
        norms[1]: block.post_attention_layernorm.weight,
    }


def save(
    folder: Path, model: Any, ways: int, stages: int, version: float = 3.0, core: bool = False, **more: Any
) -> Path:
    """The files of all ranks."""
    is_llama = isinstance(model, transformers.LlamaForCausalLM)
    body, blocks = (model.model, model.model.layers) if is_llama else (model.transformer, model.transformer.h)
    words = padded(body.embed_tokens.weight if is_llama else body.wte.weight)
    args: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": FEEDFORWARD,
        "max_position_embeddings": 24, "layernorm_epsilon": 1e-5, "tensor_model_parallel_size": ways,
        "pipeline_model_parallel_size": stages, "params_dtype": torch.float32, "bias_gelu_fusion": True,
        "padded_vocab_size": PADDED, "save": str(folder),
    }  # fmt: skip
    if is_llama:
        args |= {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
                 "add_bias_linear": False, "group_query_attention": True, "num_query_groups": GROUPS,
                 "untie_embeddings_and_output_weights": True, "rotary_base": 5000}  # fmt: skip
    args |= more
    each = LAYERS // stages
    for tp in range(ways):
        for pp in range(stages):
            layers: dict[str, Tensor] = {}
            for number in range(each):
                block = blocks[pp * each + number]
                parts = (
                    layer_of_llama(block, ways, tp, core)
                    if is_llama
                    else layer_of_gpt2(block, ways, tp, version)
                )
                layers |= {f"layers.{number}.{name}": tensor for name, tensor in parts.items()}
            if pp == stages - 1:
                final = body.norm if is_llama else body.ln_f
                name = "final_norm" if is_llama and not core else "final_layernorm"
                layers |= {f"{name}.{leaf}": getattr(final, leaf) for leaf, _ in final.named_parameters()}
            tables: dict[str, Any] = {"word_embeddings": {"weight": cut(words, 0, ways, tp)}}
            if not is_llama:
                tables["position_embeddings"] = {"weight": body.wpe.weight}
            head = cut(padded(model.lm_head.weight), 0, ways, tp)
            found: dict[str, Any]
            if core:
                found = {f"decoder.{name}": tensor for name, tensor in layers.items()}
                found |= (
                    {"embedding.word_embeddings.weight": tables["word_embeddings"]["weight"]}
                    if pp == 0
                    else {}
                )
                found |= {"output_layer.weight": head} if pp == stages - 1 else {}
                found["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
            else:
                language: dict[str, Any] = {"encoder" if version >= 2.0 else "transformer": layers}
                if pp == 0:
                    language["embedding"] = tables
                if pp == stages - 1 and is_llama:
                    language["output_layer"] = {"weight": head}
                found = {"language_model": language}
                if pp == stages - 1 and stages > 1 and not is_llama:
                    found["word_embeddings_for_head"] = {"weight": cut(words, 0, ways, tp)}
            stored = {
                "args": argparse.Namespace(**args), "iteration": 100, "model": detached(found),
                "optimizer": {"state": torch.zeros(3)},
                "rng_state": [{"np_rng_state": np.random.RandomState(0).get_state(), "random_rng_state": (3, (1, 2))}],
            } | ({"checkpoint_version": version} if version else {})  # fmt: skip
            place = folder / "iter_0000100" / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if stages > 1 else ""))
            place.mkdir(parents=True)
            torch.save(stored, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def detached(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: detached(value)
        if isinstance(value, Mapping)
        else value
        if value is None
        else value.detach().clone()
        for name, value in tree.items()
    }


def logits(folder: Path, model: Any) -> Tensor:
    """Of what was imported, by transformers; after its tensors have been compared."""
    found: Any = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    wanted = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    return found(torch.arange(20)[None] % VOCABULARY).logits.detach()


@pytest.mark.parametrize(
    ("kind", "ways", "stages", "version", "core"),
    [
        (gpt2, 1, 1, 3.0, False),
        (gpt2, 2, 2, 3.0, False),
        (gpt2, 2, 1, 1.0, False),
        (gpt2, 2, 2, 0.0, False),
        (llama, 2, 2, 3.0, False),
        (llama, 2, 4, 3.0, True),
    ],
)
def test_shards_come_back_as_the_model(
    kind: Any, ways: int, stages: int, version: float, core: bool, tmp_path: Path
) -> None:
    model = kind()
    source, target = save(tmp_path / "theirs", model, ways, stages, version, core), tmp_path / "ours"
    call = [
        "checkpoint",
        "import-megatron",
        str(source),
        str(target),
        "--vocabulary",
        str(VOCABULARY),
        "--json",
    ]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    about = json.loads(done.stdout)
    assert (about["tensor_parallel"], about["pipeline_parallel"], about["iteration"]) == (ways, stages, 100)
    tokens = torch.arange(20)[None] % VOCABULARY
    assert torch.equal(logits(target, model), model(tokens).logits.detach())
    workload: Any = load(f"hf:{target}", "causal_lm", Vocabulary(VOCABULARY, eos=0), sequence_length=20)
    ours = workload.build()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    assert torch.allclose(ours.eval()({"tokens": tokens}).logits, model(tokens).logits, atol=1e-5)


@pytest.mark.slow
def test_another_process_apart_reads_the_files(tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", gpt2(), 2, 1)
    assert import_megatron(str(source), str(tmp_path / "ours"))["model_type"] == "gpt2"
    edited(source, "mp_rank_01", lambda s: s.update(model=Bomb()))
    with pytest.raises(InputError, match=r"asks for (posix|nt)\.system, which is not plain data"):
        import_megatron(str(source), str(tmp_path / "again"))
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_padding_of_the_tables_stays_unless_it_is_cut(tmp_path: Path) -> None:
    found = import_megatron(str(save(tmp_path / "theirs", gpt2(), 2, 1)), str(tmp_path / "ours"))
    assert found["tensors"]["transformer.wte.weight"] == [PADDED, HIDDEN]
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["vocab_size"] == PADDED


class Bomb:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch bombed",)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"num_experts": 8}, "num_experts 8 is imported with Llama's layers, not with GPT-2's"),
        ({"hidden_size": "32"}, "its hidden_size is '32', which is not a number"),
        ({"hidden_size": None}, "its hidden_size is 'None'"),
        (
            {"num_query_groups": 0, "group_query_attention": True},
            "its num_query_groups is 0, which is less than 1",
        ),
        ({"num_attention_heads": 3}, "3 heads in 3 groups cannot be divided over 2 ranks"),
        ({"ffn_hidden_size": 64}, r"mlp.c_fc.weight is \[32, 48\], but its options make it \[32, 64\]"),
        ({"tensor_model_parallel_size": 1}, "tensor-parallel rank 1 and pipeline rank 0 is one too many"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p True"),
        ({"window_size": (4096, 0)}, r"window_size \(4096, 0\) is not imported"),
        ({"swiglu": True}, "are neither GPT-2's .* nor Llama's"),
        ({"num_layers": 5}, "its ranks have 4 layers together, but its options say 5"),
        (
            {"tensor_model_parallel_size": 4},
            "the file of tensor-parallel rank 2 and pipeline rank 0 is missing",
        ),
        ({"num_attention_heads": 2, "kv_channels": 4}, "rows on a rank, but its options say"),
        ({"untie_embeddings_and_output_weights": True}, "its head is not tied"),
        (
            {"bomb": Bomb()},
            r"asks for (posix|nt)\.system, which is not plain data, and nothing was run",
        ),
    ],
)
def test_what_cannot_be_imported_is_told_in_a_line(
    more: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = save(tmp_path / "theirs", gpt2(), 2, 1, **more)
    with pytest.raises(InputError, match=wanted) as error:
        import_megatron(str(source), str(tmp_path / "ours"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()
    assert not (tmp_path / "bombed").exists()


def edited(source: Path, place: str, edit: Any) -> None:
    """Change what is in a file."""
    path = source / "iter_0000100" / place / "model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    edit(stored)
    torch.save(stored, path)


def language(stored: dict[str, Any], part: str = "encoder") -> Any:
    return stored["model"]["language_model"][part]


def itself(stored: dict[str, Any]) -> None:
    stored["model"]["language_model"]["again"] = stored["model"]


QKV = "layers.0.self_attention.query_key_value"


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (lambda s: setattr(s["args"], "layernorm_epsilon", 1e-6), "rank 1 and pipeline rank 0 has other options"),
        (lambda s: s.update(iteration=50), "rank 1 and pipeline rank 0 has other options or another iteration"),
        (lambda s: s.update(args={}), "mp_rank_01/model_optim_rng.pt holds no options"),
        (lambda s: language(s).update({f"{QKV}.weight": language(s)[f"{QKV}.weight"].half()}), "other shapes or types"),
        (lambda s: language(s).update({f"{QKV}.weight": torch.zeros(1).expand(4000, 4000)}), "the end of its file"),
        (lambda s: language(s).update({f"{QKV}.weight": torch.empty(3, device="meta")}), "is not a plain tensor"),
        (lambda s: language(s).update({f"{QKV}.weight": torch.zeros(3, 3).to_sparse()}), "is not a plain tensor"),
        (lambda s: language(s).update({f"{QKV}.scale": torch.zeros(3)}), "is not a tensor of GPT that is known here"),
        (itself, "is in there twice"),
        (lambda s: s.update(model=[1]), "has no model"),
    ],
)  # fmt: skip
def test_files_that_do_not_go_together_or_are_made_to_harm(edit: Any, wanted: str, tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", gpt2(), 2, 1)
    edited(source, "mp_rank_01", edit)
    with pytest.raises(InputError, match=wanted) as error:
        import_megatron(str(source), str(tmp_path / "ours"))
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["theirs"]


def test_tensors_that_the_model_has_no_place_for_are_not_lost(tmp_path: Path) -> None:
    source = save(tmp_path / "llama", llama(), 1, 1)
    edited(source, "mp_rank_00", lambda s: language(s).update({f"{QKV}.bias": torch.zeros(64)}))
    with pytest.raises(InputError, match=r"qkv\.bias of tensor-parallel rank 0, .* would be lost"):
        import_megatron(str(source), str(tmp_path / "ours"))
    source = save(tmp_path / "gpt2", gpt2(), 1, 2)
    edited(source, "mp_rank_00_001", lambda s: s["model"]["word_embeddings_for_head"]["weight"].add_(1))
    with pytest.raises(InputError, match="the tied_head of pipeline rank 1 differs from the table of rank 0"):
        import_megatron(str(source), str(tmp_path / "ours"))
    source = save(tmp_path / "tied", llama(), 1, 1, untie_embeddings_and_output_weights=False)
    with pytest.raises(InputError, match="the head of pipeline rank 0 differs from the table"):
        import_megatron(str(source), str(tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_files_in_each_others_folders_are_told_by_the_ranks_that_wrote_them(tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", gpt2(), 2, 1)
    for rank in range(2):
        edited(source, f"mp_rank_0{rank}", lambda s, rank=rank: setattr(s["args"], "rank", rank))
    import_megatron(str(source), str(tmp_path / "right"))
    folder = source / "iter_0000100"
    for one, other in (("mp_rank_00", "kept"), ("mp_rank_01", "mp_rank_00"), ("kept", "mp_rank_01")):
        (folder / one).rename(folder / other)
    with pytest.raises(InputError, match="pipeline rank 0 was written by rank 1, not 0"):
        import_megatron(str(source), str(tmp_path / "ours"))


def test_tensors_are_made_one_at_a_time_and_a_folder_is_there_whole_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = save(tmp_path / "theirs", llama(), 2, 1), tmp_path / "ours"
    alive: list[weakref.ref[Tensor]] = []

    def fails(tensors: Iterator[tuple[str, Tensor]], folder: str) -> None:
        for _, tensor in tensors:
            alive.append(weakref.ref(tensor))
            del tensor
            assert sum(each() is not None for each in alive) <= 8
        target.mkdir()
        (target / "another").touch()  # a second import was faster

    monkeypatch.setattr(megatron_unpickle, "write", fails)
    with pytest.raises(InputError, match="the target is not empty"):
        import_megatron(str(source), str(target))
    assert len(alive) == 3 + 9 * LAYERS
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    source, soft = save(tmp_path / "theirs", llama(), 1, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, soft[1]))
    try:
        with pytest.raises(InputError, match=r"ours: cannot be written \(File too large\); make room there"):
            import_megatron(str(source), str(tmp_path / "ours"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == ["theirs"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        import_megatron(str(source), str(tmp_path / "file" / "ours"))


def test_states_of_fp8_layers_and_compressed_files(tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", llama(), 1, 1, core=True)
    extra = "decoder.layers.0.self_attention.linear_qkv._extra_state"
    edited(source, "mp_rank_00", lambda s: s["model"].update({extra: io.BytesIO(b"state")}))
    import_megatron(str(source), str(tmp_path / "ours"))
    path = source / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (tmp_path / "new").rename(path)
    with pytest.raises(InputError, match="is compressed"):
        import_megatron(str(source), str(tmp_path / "again"))


def test_folders_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no checkpoint of Megatron-LM"):
        import_megatron(str(tmp_path), str(tmp_path / "ours"))
    source = save(tmp_path / "theirs", gpt2(), 1, 1)
    file = source / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    with pytest.raises(InputError, match="has 104 rows of tokens, but 200 are requested"):
        import_megatron(str(source), str(tmp_path / "ours"), 100, 200)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"is not a file of torch\.save"):
        import_megatron(str(source), str(tmp_path / "ours"))
    (source / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(InputError, match=r"names no iteration \('../../etc'\)"):
        import_megatron(str(source), str(tmp_path / "ours"))
    (source / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "a").touch()
    with pytest.raises(InputError, match="the target is not empty"):
        import_megatron(str(source / "iter_0000100"), str(tmp_path / "ours"))


def test_a_class_of_megatron_is_an_inert_placeholder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import enum
    import sys
    import types

    theirs = types.ModuleType("megatron.core.enums")

    class ModelType(enum.Enum):
        encoder = 1

    ModelType.__module__ = ModelType.__qualname__ = "megatron.core.enums"
    ModelType.__qualname__ = "ModelType"
    theirs.ModelType = ModelType  # type: ignore[attr-defined]
    with monkeypatch.context() as here:
        for name in ("megatron", "megatron.core"):
            here.setitem(sys.modules, name, types.ModuleType(name))
        here.setitem(sys.modules, "megatron.core.enums", theirs)
        source = save(tmp_path / "theirs", gpt2(), 1, 1, model_type=ModelType.encoder)
    assert import_megatron(str(source), str(tmp_path / "ours"))["model_type"] == "gpt2"
