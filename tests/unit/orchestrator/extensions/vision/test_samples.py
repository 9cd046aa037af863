"""Images of folders and of archives become the same arrays; what cannot be used is said, or left out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.data.prepare import rejections
from orchestrator.data.samples.own_samples import prepare_samples
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.extensions.vision import samples as module
from orchestrator.extensions.vision.files import ImageSource, decoded
from orchestrator.extensions.vision.samples import Images
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
    index = json.loads(found["index.json"])
    assert index.pop("sums").keys() == {"labels", "classes"}
    assert index == {
        "count": 5,
        "rejected": {},
        "classes": ["cat", "dog"],
        "parts": [2, 2, 1],
    }


def test_a_sample_is_the_image_scaled_with_its_caption_and_class(folder: Path, tmp_path: Path) -> None:
    Images(str(folder), **OPTIONS).prepare(str(tmp_path / "out"))
    samples = OwnSamples(NAMED, {"uri": str(folder), **OPTIONS, "patches": 4}, 0, str(tmp_path / "out"))
    batch, _ = samples.batch([0, 1, 4], [0, 0, 0])
    whole = Image.open(folder / "dog" / "4.png").resize((8, 9), Image.Resampling.BICUBIC).crop((0, 0, 8, 8))
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
    if kind == "orphan":
        (folder / "cat" / "9.txt").write_text("a cat")
    if kind == "latin":
        (folder / "cat" / "2.txt").write_bytes(b"caf\xe9")
    if kind == "giant":
        (folder / "cat" / "2.txt").write_text("a" * 70_000)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("torn", "image", r"cannot be decoded .*truncated.*0\.png|0\.png: cannot be decoded"),
        ("text", "image", "cannot be decoded"),
        ("type", "type", "is not an image by the end of its name"),
        ("caption", "caption", "has no caption"),
        ("orphan", "caption", "without an image of the same name"),
        ("latin", "encoding", "is not UTF-8"),
        ("giant", "caption", "a caption of 70000 bytes"),
    ],
)
def test_bad_images_fail_in_one_line_or_are_left_out(
    folder: Path, tmp_path: Path, kind: str, name: str, message: str
) -> None:
    spoil(folder, kind)
    with pytest.raises(InputError, match=message) as error:
        Images(str(folder), **OPTIONS).prepare(str(tmp_path / "fails"))
    assert "\n" not in str(error.value)
    assert "or set data.samples.options.on_error" in str(error.value)
    left = 4 if kind in ("torn", "text", "latin", "giant") else 5
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


def archive_of(target: Path, *members: tuple[str, bytes]) -> Images:
    """The images of an archive with these members; one without content is a link."""
    with tarfile.open(target, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), tarfile.REGTYPE if data else tarfile.LNKTYPE
            info.linkname = "" if data else members[0][0]
            archive.addfile(info, io.BytesIO(data))
    return Images(str(target), **OPTIONS, classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.png", png(0)), ("0.png", png(1)), ("0.cls", b"1")], r"0\.png is there twice"),
        ([("0.png", png(0)), ("0.jpg", png(1)), ("0.cls", b"1")], r"several images \(jpg, png\)"),
        ([("0.png", png(0)), ("0.PNG", png(1)), ("0.cls", b"1")], "0 has a member twice"),
        ([("0.png", png(0)), ("0.cls", b"1"), ("1.png", b"")], r"1\.png is a link"),
        ([("0.png", png(0)), ("0.cls", b"2")], "the class '2', which is not in options.classes"),
        ([("0.cls", b"1")], "0 has no image"),
    ],
)
def test_nothing_of_an_archive_is_lost_in_silence(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        archive_of(tmp_path / "set.tar", *members).prepare(str(tmp_path / "out"))


def test_endings_may_be_in_capitals_and_classes_are_numbered_by_name(tmp_path: Path) -> None:
    images = archive_of(
        tmp_path / "set.tar", ("0.PNG", png(0)), ("0.CLS", b"1"), ("1.png", png(1)), ("1.cls", b"0")
    )
    assert images.prepare(str(tmp_path / "out"))["count"] == 2
    images.open(str(tmp_path / "out"))
    assert [int(images.sample(n, np.random.default_rng())["label"]) for n in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("options", "said", "labels", "classes"),
    [
        ({}, ["0", "2", "10", "1"], [0, 2, 3, 1], ["0", "1", "2", "10"]),
        ({"classes": ["zebra", "ant", "bee"]}, ["0", "bee", "1", "0"], [0, 2, 1, 0], ["zebra", "ant", "bee"]),
        (
            {"classes": ["ant", "bee", "cat", "dog"]},
            ["3", "1", "2", "1"],
            [3, 1, 2, 1],
            ["ant", "bee", "cat", "dog"],
        ),
    ],
)
def test_a_label_is_the_place_of_its_class(
    tmp_path: Path, options: dict[str, Any], said: list[str], labels: list[int], classes: list[str]
) -> None:
    members = [
        pair for n, name in enumerate(said) for pair in ((f"{n}.png", png(n)), (f"{n}.cls", name.encode()))
    ]
    archive_of(tmp_path / "set.tar", *members)
    images = Images(str(tmp_path / "set.tar"), **OPTIONS, **options)
    images.prepare(str(tmp_path / "out"))
    images.open(str(tmp_path / "out"))
    assert [int(images.sample(n, np.random.default_rng())["label"]) for n in range(4)] == labels
    assert json.loads((tmp_path / "out" / "index.json").read_text())["classes"] == classes
    assert len(images.of_set()["classes"]) == len(classes)
    by_number = [line["count"] for line in rejections.read(DataFolder(str(tmp_path / "out")))]
    assert by_number == ([sum(name not in classes for name in said)] if {*said} - {*classes} else [])


def test_a_number_is_no_index_where_a_class_has_a_number_as_its_name(tmp_path: Path) -> None:
    members = [("0.png", png(0)), ("0.cls", b"5"), ("1.png", png(1)), ("1.cls", b"0")]
    archive_of(tmp_path / "stars.tar", *members)
    stars = {"classes": ["1", "2", "3", "4", "5"]}
    with pytest.raises(InputError, match=r"the class '0', which is not in options\.classes"):
        Images(str(tmp_path / "stars.tar"), **OPTIONS, **stars).prepare(str(tmp_path / "fails"))
    skipping = Images(str(tmp_path / "stars.tar"), **OPTIONS, **stars, on_error="skip")
    assert skipping.prepare(str(tmp_path / "out"))["count"] == 1
    skipping.open(str(tmp_path / "out"))
    assert int(skipping.sample(0, np.random.default_rng())["label"]) == 4


def test_an_archive_with_names_and_numbers_needs_the_names_of_all_classes(tmp_path: Path) -> None:
    members = [("0.png", png(0)), ("0.cls", b"1"), ("1.png", png(1)), ("1.cls", b"zebra")]
    archive_of(tmp_path / "set.tar", *members)
    says = (
        r"set.tar: names some classes \(zebra\) and numbers others \(1\); name all classes in options.classes"
    )
    with pytest.raises(InputError, match=says):
        Images(str(tmp_path / "set.tar"), **OPTIONS).prepare(str(tmp_path / "out"))


@pytest.mark.parametrize("how", ["cut", "flipped"])
@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_damaged_archive_that_is_compressed_is_told(
    folder: Path, tmp_path: Path, kind: str, how: str
) -> None:
    plain = tar_of(folder, tmp_path / "set.tar").read_bytes()
    packed = {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(plain)
    archive = tmp_path / f"cut.tar.{kind}"
    if how == "cut":
        archive.write_bytes(packed[: len(packed) // 2])
    else:  # the checksum alone
        archive.write_bytes(packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:])
    with pytest.raises(InputError, match=r"is (damaged|cut off)"):
        Images(str(archive), **OPTIONS).prepare(str(tmp_path / "fails"))
    sound = tmp_path / f"whole.tar.{kind}"
    sound.write_bytes(packed)
    assert Images(str(sound), **OPTIONS).prepare(str(tmp_path / "whole"))["count"] == 5


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **how)
    return held.getvalue()


RAMP = np.linspace(0, 255, 144).reshape(12, 12)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (Image.fromarray((RAMP * 257).astype(np.uint16)), "PNG"),
        (Image.fromarray((RAMP * 257).astype(np.uint16)), "TIFF"),
        (Image.fromarray(RAMP.astype(np.uint8)).convert("P"), "PNG"),
        (Image.fromarray(RAMP.astype(np.uint8)).convert("LA"), "PNG"),
        (Image.fromarray(RAMP.astype(np.uint8)).convert("RGBA"), "WEBP"),
        (Image.fromarray(RAMP.astype(np.uint8)).convert("CMYK"), "JPEG"),
    ],
    ids=["16 bits", "tiff", "palette", "grey with alpha", "alpha", "cmyk"],
)
def test_every_kind_of_numbers_gives_the_same_image(image: Image.Image, kind: str, channels: int) -> None:
    found = decoded(encoded(image, kind), 8, channels).astype(int)
    plain = decoded(encoded(Image.fromarray(RAMP.astype(np.uint8)), "PNG"), 8, channels).astype(int)
    assert np.abs(found - plain).max() <= 8


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    plain = Image.fromarray(RAMP.astype(np.uint8))
    found = decoded(encoded(plain, "PNG", exif=turned), 12, 1)
    assert np.array_equal(found[..., 0], np.rot90(RAMP.astype(np.uint8), -1))


def test_damaged_metadata_takes_no_image_away() -> None:
    plain = Image.fromarray(RAMP.astype(np.uint8))
    found = decoded(encoded(plain, "PNG", exif=b"Exif\0\0garbage"), 12, 1)
    assert np.array_equal(found[..., 0], RAMP.astype(np.uint8))
    with pytest.raises(Unfit, match="cannot be decoded"):
        decoded(encoded(plain, "PNG", exif=b"Exif\0\0garbage")[:-40], 12, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "32-bit numbers"),
        (encoded(Image.new("RGB", (4, 4)), "EPS"), "is not one of JPEG"),  # Pillow runs Ghostscript on it
        (encoded(Image.new("1", (12_000, 12_000)), "PNG"), "12000 x 12000 pixels, more than"),
    ],
    ids=["floats", "postscript", "large"],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_what_is_not_decoded(data: bytes, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        decoded(data, 8, 3)


def transparent(mode: str) -> bytes:
    """Random colours, of which some are transparent."""
    rng = np.random.default_rng(5)
    if mode == "P":
        image = Image.fromarray(rng.integers(0, 9, (40, 30), np.uint8), "P")
        image.putpalette(rng.integers(0, 256, 27, np.uint8).tobytes())
        return encoded(image, "PNG", transparency=3)
    return encoded(Image.fromarray(rng.integers(0, 256, (40, 30, len(mode)), np.uint8), mode), "PNG")


@pytest.mark.parametrize(
    ("data", "size"),
    [
        *((png(3, given), 8) for given in ((12, 12), (30, 11), (9, 40), (5, 7), (8, 2000))),
        *((png(4, given), 96) for given in ((480, 640), (60, 4508), (301, 97))),
        *((transparent(mode), 16) for mode in ("RGBA", "LA", "P")),
    ],
)
def test_pixels_are_those_of_transformers(data: bytes, size: int) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size=size, do_rescale=False, do_normalize=False
    )(Image.open(io.BytesIO(data)))["pixel_values"][0]
    assert np.array_equal(decoded(data, size, 3).transpose(2, 0, 1), theirs)


def word_tokenizer(path: Path, ends: bool = True) -> Path:
    """A tokenizer of three words, that puts an end after them."""
    found = Tokenizer(
        models.WordLevel({"a": 0, "cat": 1, "dog": 2, "two": 3, "<end>": 4, "?": 5}, unk_token="?")
    )
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        found.post_processor = processors.TemplateProcessing(
            single=["$A", "<end>"], special_tokens=[("<end>", 4)]
        )
    found.save(str(path))
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
@pytest.mark.parametrize("tokens", [5, 16])
def test_transformers_makes_the_same_inputs(
    folder: Path, tmp_path: Path, tokenizer: str, tokens: int
) -> None:
    from transformers import CLIPProcessor

    (folder / "cat" / "2.txt").write_text("a très <b> dog\n")
    named = str(word_tokenizer(tmp_path / "tokenizer.json")) if tokenizer == "words" else tokenizer
    options = {**OPTIONS, "tokens": tokens, "tokenizer": named, "mean": [0.4, 0.5, 0.6], "std": 0.2}
    prepared, target = str(tmp_path / "out"), tmp_path / "export"
    images = Images(str(folder), **options)
    images.prepare(prepared)
    images.open(prepared)
    target.mkdir()
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)  # what was prepared has it
    images.export(prepared, str(target))
    read = CLIPProcessor.from_pretrained(target)
    said = ["a cat", "a très <b> dog", "a dog"]
    found = read(
        text=said,
        images=[Image.open(folder / f"{name}.png") for name in ("cat/0", "cat/2", "dog/1")],
        padding="max_length",
        truncation=True,
        return_tensors="np",
    )
    for row, number in enumerate((0, 1, 2)):
        sample = images.sample(number, np.random.default_rng())
        assert sample["caption"].tolist() == found["input_ids"][row].tolist()
        assert np.abs(sample["pixels"] - found["pixel_values"][row]).max() < 1e-6


def test_captions_that_are_cut_are_counted_and_classes_stay_apart(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "2.txt").write_text("longer than twelve bytes")
    options = {**OPTIONS, "tokens": 12, "on_error": "skip", "max_rejected": 0}
    about = Images(str(folder), **options).prepare(str(tmp_path / "out"))
    assert about == {"count": 5, "rejected": {"repaired": {"cut": 1}}}
    line = json.loads((tmp_path / "out" / "rejected.jsonl").read_text())
    assert line["examples"] == [
        {"what": "a caption is longer than 12 tokens", "text": "longer than twelve bytes"}
    ]
    Images(str(folder), **{**OPTIONS, "tokens": 7}).prepare(str(tmp_path / "fits"))  # "a cat" between two
    with pytest.raises(InputError, match="of the classes cat and dog are the same 4 tokens; raise it"):
        Images(str(folder), **{**OPTIONS, "tokens": 4}).prepare(str(tmp_path / "same"))


def test_another_tokenizer_is_other_data(folder: Path, tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json")
    images = Images(str(folder), **{**OPTIONS, "tokenizer": str(path)})
    before = images.fingerprint()
    assert images.fingerprint() == before
    word_tokenizer(path, ends=False)
    assert images.fingerprint() != before


def test_a_caption_may_have_any_braces(folder: Path, tmp_path: Path) -> None:
    images = Images(str(folder), **{**OPTIONS, "caption": "{x} {}"})
    images.prepare(str(tmp_path / "out"))
    images.open(str(tmp_path / "out"))
    said = images.of_set()["classes"][0]
    assert bytes(said[said < 256].tolist()).decode() == "{x} cat"


@pytest.mark.parametrize("name", ["part-00000", "captions-00000", "sums-00000", "labels", "classes"])
def test_what_is_damaged_is_not_believed(folder: Path, tmp_path: Path, name: str) -> None:
    images, path = Images(str(folder), **OPTIONS), tmp_path / "out" / f"{name}.npy"
    images.prepare(str(tmp_path / "out"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last image
    path.write_bytes(data)
    with pytest.raises(InputError, match="has changed since it was prepared; remove it"):
        images.open(str(tmp_path / "out")) or images.sample(4, np.random.default_rng())


def test_what_is_prepared_is_used_again_and_no_file_is_read(folder: Path, tmp_path: Path) -> None:
    named = ObjectReference.model_validate({"use": NAMED, "options": {"uri": str(folder), **OPTIONS}})
    uri = prepare_samples(named, 0, str(tmp_path / "cache"))
    assert prepare_samples(named, 1, str(tmp_path / "cache")) == uri  # whatever the seed
    (folder / "cat" / "0.png").unlink()
    assert prepare_samples(named, 0, str(tmp_path / "cache"), uri.rsplit("/", 1)[-1]) == uri
    assert prepare_samples(named, 0, str(tmp_path / "cache")) != uri


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 2}, "1 or 3 channels"),
        ({"caption": "a photo"}, "has no placeholder for the class"),
        ({"crop": 0.0}, "share of the area"),
        ({"on_error": "repair"}, "make it fail or skip"),
        ({"tokens": 2}, "at least 3"),
        ({"size": 8.5}, r"size is 8\.5; give a whole number"),
        ({"classes": "cat"}, "give a list of names"),
        ({"std": 0.0}, "std is positive"),
        ({"max_rejected": 3}, "set on_error to skip"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Images(**{"uri": "x", **OPTIONS, **changes})


def test_folders_may_begin_with_an_underscore_and_hidden_files_are_none(folder: Path, tmp_path: Path) -> None:
    (folder / "_other").mkdir()
    (folder / "_other" / "5.png").write_bytes(png(5))
    (folder / "cat" / "._0.png").write_bytes(b"of a file system")
    assert Images(str(folder), **OPTIONS).prepare(str(tmp_path / "out"))["count"] == 6


def test_files_are_read_several_at_once_and_stay_in_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, read = threading.Barrier(6, timeout=10.0), ImageSource._bytes

    def waits(self: ImageSource, place: Any, name: str) -> bytes:
        together.wait()  # for all five images and the caption
        return read(self, place, name)

    source = ImageSource(str(folder), "fail", "")
    monkeypatch.setattr(ImageSource, "_bytes", waits)
    found = list(source.read(Rejected()))
    assert [Path(image.file.uri).name for image in found] == [f"{n}.png" for n in (0, 2, 1, 3, 4)]
    assert [image.data for image in found] == [png(n) for n in (0, 2, 1, 3, 4)]
    assert [image.caption for image in found] == [None, "two", None, None, None]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder with images"):
        Images(str(tmp_path / "none"), **OPTIONS).prepare(str(tmp_path / "out"))
