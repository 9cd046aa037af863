"""Import of DeepSpeed checkpoints: what comes out, and that nothing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orchestrator.config.errors import InputError
from orchestrator.extensions.importers import deepspeed
from orchestrator.extensions.importers.deepspeed import import_checkpoint
from orchestrator.extensions.importers.deepspeed_unpickle import Refused, convert

WEIGHTS = {
    "embed.weight": torch.arange(21.0).view(7, 3),
    "norm.weight": torch.arange(5.0) + 0.5,
    "head.weight": -torch.arange(8.0).view(2, 4),
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read in this process, which takes less time than one of its own."""

    def ask(_: str, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            return convert(Path(asked["folder"]), asked["target"], asked["trust"])
        except Refused as error:
            raise InputError(str(error), asked["folder"], "") from None

    monkeypatch.setattr(deepspeed, "ask", ask)


class Opens:
    """A pickle that makes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def save(folder: Path, stage: int, ranks: int = 2, extra: Any = None) -> Path:
    """The files that ZeRO of that stage leaves, as DeepSpeed 0.19 lays them out."""
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = [{name: tensor.shape for name, tensor in WEIGHTS.items()}]
    model = {"module": {"table": torch.ones(2).bfloat16()}, "buffer_names": ["table"], "param_shapes": shapes,
             "shared_params": {}, "ds_version": "0.19", "client": extra}  # fmt: skip
    for rank in range(ranks):
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            parts = []
            for tensor in WEIGHTS.values():
                size = -(-tensor.numel() // ranks)
                padded = torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
                parts.append(padded[rank * size : (rank + 1) * size])
            state["fp32_flat_groups"] = [torch.cat(parts[:2]), parts[2]]
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            flat = torch.cat([t.flatten() for t in WEIGHTS.values()])
            size = -(-len(flat) // ranks)
            padded = torch.nn.functional.pad(flat, (0, size * ranks - len(flat)))
            state["single_partition_of_fp32_groups"] = [padded[rank * size : (rank + 1) * size].clone()]
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        torch.save(model, tag / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("stage", "ranks"), [(2, 3), (3, 2)])
def test_the_weights_come_out_whole(tmp_path: Path, stage: int, ranks: int) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    source = save(tmp_path / "theirs", stage, ranks)
    found = import_checkpoint(str(source), str(tmp_path / "ours"), config=str(config))
    assert (found["stage"], found["ranks"], found["version"]) == (stage, ranks, "0.19")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert tensors.keys() == {*WEIGHTS, "table"}
    for name, tensor in WEIGHTS.items():
        assert torch.equal(tensors[name], tensor)
    assert tensors["table"].dtype == torch.float32
    assert (tmp_path / "ours" / "config.json").read_text() == "{}"


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    source = save(tmp_path / "theirs", 2, extra=Opens(mark))
    with pytest.raises(InputError, match=r"would run posix\.mkdir when it is unpickled; .* add --trust"):
        import_checkpoint(str(source), str(tmp_path / "ours"))
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()


def test_with_trust_it_runs_in_another_process(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    source = save(tmp_path / "theirs", 2, extra=Opens(mark))
    import_checkpoint(str(source), str(tmp_path / "ours"), trust=True)
    assert mark.exists()
    assert torch.equal(
        load_file(tmp_path / "ours" / "model.safetensors")["norm.weight"], WEIGHTS["norm.weight"]
    )


@pytest.mark.usefixtures("here")
def test_a_missing_rank_is_told(tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", 2, 3)
    (source / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(InputError, match="3 ranks wrote it and 2 "):
        import_checkpoint(str(source), str(tmp_path / "ours"))


@pytest.mark.parametrize("tag", [None, "global_step9"])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, tag: str | None) -> None:
    with pytest.raises(InputError, match="there is no DeepSpeed ZeRO checkpoint"):
        import_checkpoint(str(tmp_path), str(tmp_path / "ours"), tag)


def test_a_target_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", 2)
    with pytest.raises(InputError, match="the target is not empty"):
        import_checkpoint(str(source), str(source))
