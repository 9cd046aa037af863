"""Images of folders and of archives become the same arrays; what cannot be used is said, or left out."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from orchestrator.data import images as module
from orchestrator.data.images import Images
from orchestrator.data.own_samples import prepare_samples
from orchestrator.job.errors import InputError
from orchestrator.job.reference import Reference
from workloads.own.samples import OwnSamples

OPTIONS: dict[str, Any] = {"size": 8, "tokens": 16, "caption": "a {}"}
NAMED = "orchestrator.data.images:Images"


def png(value: int, size: tuple[int, int] = (12, 10)) -> bytes:
    rng, held = np.random.default_rng(value), io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(held, "PNG")
    return held.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images of two classes, one of which has a caption of its own."""
    for number, name in enumerate(("cat", "dog", "cat", "dog", "dog")):
        path = tmp_path / "set" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    (tmp_path / "set" / "cat" / "2.txt").write_text("two\n")
    return tmp_path / "set"


def tar_of(folder: Path, target: Path) -> Path:
    """The same images as WebDataset has them."""
    with tarfile.open(target, "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            members = {"png": path.read_bytes(), "cls": path.parent.name.encode()}
            if (said := path.with_suffix(".txt")).exists():
                members["txt"] = said.read_bytes()
            for kind, data in members.items():
                info = tarfile.TarInfo(f"{path.parent.name}-{path.stem}.{kind}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return target


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_folder_and_an_archive_give_the_same_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 2 * 8 * 8 * 3)
    one, two = tmp_path / "one", tmp_path / "two"
    Images(str(folder), **OPTIONS).prepare(str(one))
    Images(str(tar_of(folder, tmp_path / "set.tar")), **OPTIONS).prepare(str(two))
    found = parts(one)
    assert found == parts(two)
    assert [name for name in found if name.startswith("part")] == [f"part-0000{i}.npy" for i in range(3)]
    assert json.loads(found["index.json"]) == {
        "count": 5,
        "rejected": {},
        "classes": ["cat", "dog"],
        "parts": [2, 2, 1],
    }


def test_a_sample_is_the_image_scaled_with_its_caption_and_class(folder: Path, tmp_path: Path) -> None:
    Images(str(folder), **OPTIONS).prepare(str(tmp_path / "out"))
    samples = OwnSamples(NAMED, {"uri": str(folder), **OPTIONS, "patches": 4}, 0, str(tmp_path / "out"))
    batch, _ = samples.batch([0, 1, 4], [0, 0, 0])
    whole = Image.open(folder / "dog" / "4.png").resize((8, 8), Image.Resampling.BICUBIC, (0, 1, 10, 11))
    expected = np.asarray(whole, np.float32).transpose(2, 0, 1) / 255 * 2 - 1
    assert np.abs(batch["pixels"][2].numpy() - expected).max() < 1e-6
    assert batch["label"].tolist() == [0, 0, 1]
    texts = [bytes(ids[ids < 256].tolist()).decode() for ids in batch["caption"]]
    assert texts == ["a cat", "two", "a dog"]
    assert batch["caption"][0, [0, -1]].tolist() == [256, 257]
    assert batch["noise"].shape == (3, 4)
    assert [bytes(i[i < 256].tolist()).decode() for i in samples.of_set()["classes"]] == ["a cat", "a dog"]


def test_what_training_changes_is_a_function_of_seed_sample_and_turn(folder: Path, tmp_path: Path) -> None:
    changed = {"uri": str(folder), **OPTIONS, "crop": 0.4, "mirror": True}
    Images(**changed).prepare(str(tmp_path / "out"))
    one, again = (OwnSamples(NAMED, changed, 1, str(tmp_path / "out")) for _ in range(2))
    plain = OwnSamples(NAMED, {"uri": str(folder), **OPTIONS}, 1, str(tmp_path / "out"))
    assert np.array_equal(one.arrays(3, 2)["pixels"], again.arrays(3, 2)["pixels"])
    assert not np.array_equal(one.arrays(3, 2)["pixels"], one.arrays(3, 1)["pixels"])
    assert np.array_equal(one.arrays(3, 0, held_out=True)["pixels"], plain.arrays(3, 0)["pixels"])


def spoil(folder: Path, kind: str) -> None:
    if kind == "torn":
        (folder / "cat" / "0.png").write_bytes(png(0)[:200])
    if kind == "text":
        (folder / "cat" / "0.png").write_text("no image")
    if kind == "type":
        (folder / "cat" / "0.pdf").write_bytes(b"%PDF")
    if kind == "caption":
        (folder / "lonely.png").write_bytes(png(9))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("torn", "image", r"cannot be decoded .*truncated.*0\.png|0\.png: cannot be decoded"),
        ("text", "image", "cannot be decoded"),
        ("type", "type", "is no image by the end of its name"),
        ("caption", "caption", "has no caption"),
    ],
)
def test_bad_images_fail_in_one_line_or_are_left_out(
    folder: Path, tmp_path: Path, kind: str, name: str, message: str
) -> None:
    spoil(folder, kind)
    with pytest.raises(InputError, match=message) as error:
        Images(str(folder), **OPTIONS).prepare(str(tmp_path / "fails"))
    assert "\n" not in str(error.value)
    left = 4 if kind in ("torn", "text") else 5
    about = Images(str(folder), **OPTIONS, on_error="skip").prepare(str(tmp_path / "skips"))
    assert about == {"count": left, "rejected": {"left out": {name: 1}}}
    line = json.loads((tmp_path / "skips" / "rejected.jsonl").read_text())
    assert (line["kind"], line["count"]) == (name, 1)
    with pytest.raises(InputError, match=f"1 of {left + 1} images are left out"):
        Images(str(folder), **OPTIONS, on_error="skip", max_rejected="1%").prepare(str(tmp_path / "limit"))


def test_bad_rows_of_an_archive(folder: Path, tmp_path: Path) -> None:
    spoil(folder, "torn")
    archive = tar_of(folder, tmp_path / "set.tar")
    with pytest.raises(InputError, match=r"row 1: cannot be decoded"):
        Images(str(archive), **OPTIONS).prepare(str(tmp_path / "fails"))
    about = Images(str(archive), **OPTIONS, on_error="skip").prepare(str(tmp_path / "skips"))
    assert about["count"] == 4
    (folder / "cat" / "0.png").write_bytes(png(0))
    tar_of(folder, archive)
    archive.write_bytes(archive.read_bytes()[:-11_000])
    found = Images(str(archive), **OPTIONS, on_error="skip").prepare(str(tmp_path / "cut"))
    assert found["rejected"]["left out"]["torn"] == 1


def test_what_is_prepared_is_used_again_and_no_file_is_read(folder: Path, tmp_path: Path) -> None:
    named = Reference.model_validate({"use": NAMED, "options": {"uri": str(folder), **OPTIONS}})
    uri = prepare_samples(named, 0, str(tmp_path / "cache"))
    assert prepare_samples(named, 1, str(tmp_path / "cache")) == uri  # whatever the seed
    (folder / "cat" / "0.png").unlink()
    assert prepare_samples(named, 0, str(tmp_path / "cache"), uri.rsplit("/", 1)[-1]) == uri
    assert prepare_samples(named, 0, str(tmp_path / "cache")) != uri


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 2}, "1 or 3 channels"),
        ({"caption": "a photo"}, "has no place for the class"),
        ({"crop": 0.0}, "share of the area"),
        ({"on_error": "repair"}, "make it fail or skip"),
        ({"tokens": 2}, "at least 3"),
        ({"std": 0.0}, "std is positive"),
        ({"max_rejected": 3}, "set on_error to skip"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Images(**{"uri": "x", **OPTIONS, **changes})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder with images"):
        Images(str(tmp_path / "none"), **OPTIONS).prepare(str(tmp_path / "out"))
