"""Image samples: decoded once to uint8 arrays of one size, which training reads by number.

    <folder>/part-00000.npy      uint8 [images, size, size, channels], as many as PART_BYTES hold
    <folder>/captions-00000.npy  int32 [images, tokens] of the same images, if there are captions
    <folder>/sums-00000.npy      uint64 [images], checksums of both
    <folder>/labels.npy          int32 [images], -1 for an image without a class
    <folder>/classes.npy         int32 [classes, tokens], a caption of each class
    <folder>/tokenizer.json      the tokenizer of the captions, unless they are bytes
    <folder>/index.json          number of images, the classes, and the sizes of the parts; written last

Random crops, mirroring and noise for masks depend only on the seed and the sample.
"""

from __future__ import annotations

import os
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.lib.format import open_memmap

from orchestrator.config.errors import InputError
from orchestrator.data.config import ceiling_of
from orchestrator.data.prepare import rejections
from orchestrator.data.prepare.labels import BY_NUMBER, Labels
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.rejected import LEFT_OUT, Rejected, Unfit
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.extensions.vision.captions import BYTES, FILE, Captions
from orchestrator.extensions.vision.files import ON_ERROR, ImageSource, RawImage, decoded
from orchestrator.extensions.vision.inputs import processor_config, write_inputs
from orchestrator.extensions.vision.parts import (
    CAPTIONS,
    PART,
    SUMS,
    DecodedImages,
    Encoder,
    npy,
    part_name,
    sum_of,
)


def _check_sizes(size: int, channels: int, tokens: int, patches: int, crop: float) -> None:
    """Raise ValueError for a size of `Images` that is not a valid number."""
    for name, value in (("size", size), ("channels", channels), ("tokens", tokens), ("patches", patches)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}; give a whole number")
    if size < 1 or channels not in (1, 3):
        raise ValueError(f"size {size} and channels {channels}; give a size, and 1 or 3 channels")
    if tokens and tokens < 3:
        raise ValueError("tokens has start and end; give at least 3, or 0 for no captions")
    if not 0.0 < crop <= 1.0:
        raise ValueError(
            f"crop is a share of the area, and {crop:g} is not between 0 and 1; set 0.5, for example"
        )


def _check_rejection(on_error: str, max_rejected: int | str | None) -> None:
    """Raise ValueError for an unknown policy of unusable images, or a limit that the policy never reaches."""
    if on_error not in ("fail", "skip"):
        raise ValueError(f"on_error is {on_error}; make it fail or skip")
    if max_rejected is not None:
        ceiling_of(max_rejected)
        if on_error == "fail":
            raise ValueError("max_rejected needs a policy that leaves something out; set on_error to skip")


WHERE = "data.samples.options"
INDEX = "index.json"
FORMAT = 4
"""Format of the prepared images. It changes when decoding changes."""
PART_BYTES = 2**26
AT_ONCE = 64
"""Number of images that several threads decode together."""


class Images:
    """The images of a folder or of archives, for `data.samples`; see the guide.

    A sample has `pixels`, float32 [channels, size, size]. With `tokens` it has a `caption`, int64 [tokens]; with
    classes a `label`; with `patches` that many random numbers, `noise`.

    Args:
        uri: a folder of images, whose first subfolder is the class and where `x.txt` is the caption of `x.png`; or a
            path or glob of .tar files in WebDataset's layout (jpg, png, ..; txt; cls).
        size, channels: of the arrays.
        caption: template for images without a caption, in which {} is the class.
        classes: names of the classes; labels are indices into them, and files may give an index instead of a name if no
            class has that index as its name.
            Without it, labels are indices into the sorted names.
        tokenizer: bytes, or a tokenizer.json.
        tokens: length of a caption, including start and end; 0 for no captions.
        patches: number of random numbers in a sample.
        mean, std: normalisation of the pixels, which range from 0 to 1.
        crop: minimum share of an image's area that training cuts out; 1 for no cropping.
        mirror: whether training mirrors half of the images.
        on_error: fail or skip, for unusable images.
        max_rejected: as in `data`.

    Raises ValueError for invalid arguments.
    """

    def __init__(
        self,
        uri: str,
        size: int,
        channels: int = 3,
        caption: str = "",
        classes: Sequence[str] = (),
        tokenizer: str = BYTES,
        tokens: int = 0,
        patches: int = 0,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        crop: float = 1.0,
        mirror: bool = False,
        on_error: str = "fail",
        max_rejected: int | str | None = None,
    ) -> None:
        if find_spec("PIL") is None:
            raise ValueError("images need Pillow; install the extra [image]")
        if not isinstance(uri, str):
            raise ValueError(f"uri is {uri!r}; give one folder, or a path or glob of archives")
        if type(mirror) is not bool:
            raise ValueError(f"mirror is {mirror!r}; make it true or false")
        if isinstance(classes, str) or len(set(map(str, classes))) < len(classes):
            raise ValueError(f"classes is {classes!r}; give a list of names, each once")
        _check_sizes(size=size, channels=channels, tokens=tokens, patches=patches, crop=crop)
        _check_rejection(on_error, max_rejected)
        if caption and "{}" not in caption:
            raise ValueError(f"caption {caption!r} has no placeholder for the class; put {{}} there")
        self._source = ImageSource(uri, on_error, f"{WHERE}.uri")
        self._size = size
        self._channels = channels
        self._caption = caption
        self._named = [*map(str, classes)]
        self._known = Labels(tuple(self._named))
        self._texts = Captions(tokenizer, tokens, f"{WHERE}.tokenizer")
        self._tokens = tokens
        self._patches = patches
        self._mean, self._std = (np.asarray(value, np.float32).reshape(-1, 1, 1) for value in (mean, std))
        if not (self._std > 0).all() or {len(self._mean), len(self._std)} - {1, channels}:
            raise ValueError(f"mean and std are one number or {channels}, and std is positive")
        self._crop = crop
        self._mirror = mirror
        self._limit = max_rejected
        self._folder = Path()
        self._about = dict[str, Any]()

    def fingerprint(self) -> str:
        """Return a checksum of all files, the tokenizer's included, and of the format."""
        digest = xxhash.xxh3_128_hexdigest(self._texts.file() or b"")
        return f"{FORMAT} {digest} {self._source.fingerprint()}"

    def prepare(self, folder: str, max_images: int | None = None) -> dict[str, Any]:
        """Decode all images, or the first `max_images`, into `folder`.

        Returns their count and the rejected ones by kind.

        Raises InputError for unusable images unless they are skipped, and if no image is left.
        """
        target = DataFolder(folder)
        rejected = Rejected(ON_ERROR)
        ids = self._texts.encoder()
        archive = SourceFile(0, self._source.uri, kind=".image", size=0, content="", field="")
        cut = Unfit("cut", f"a caption is longer than {self._tokens} tokens")
        decoded = DecodedImages(
            target,
            max(1, PART_BYTES // (self._size**2 * self._channels)),
            ids,
            lambda caption: rejected.repair(archive, cut, sample=caption),
            self._named,
        )
        with warnings.catch_warnings():
            # Our own check limits the image size, and nothing depends on damaged metadata.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            for image, pixels in islice(self._decoded(rejected), max_images):
                decoded.add(pixels, image.label, image.caption or "")
        decoded.flush()
        left_out = rejected.to_json()
        totals = rejections.write(target, left_out)
        self._check_rejected(totals, decoded.count)
        self._check_one_kind(decoded.classes)
        if not decoded.count:
            raise InputError("holds no image that can be used", f"{WHERE}.uri {self._source.uri}", "check it")
        if text := self._texts.file():
            target.write(FILE, text)
        arrays = {"labels": npy(decoded.labels)} if decoded.classes else {}
        if ids and self._caption and decoded.classes:
            arrays["classes"] = npy(self._of_classes(ids, decoded.classes))
        for name, data in arrays.items():
            target.write(f"{name}.npy", data)
        sums = {name: xxhash.xxh3_64_hexdigest(data) for name, data in arrays.items()}
        about = {"count": decoded.count, "rejected": totals}
        target.write_json(INDEX, {**about, "classes": decoded.classes, "parts": decoded.sizes, "sums": sums})
        return about

    def _of_classes(self, ids: Encoder, classes: Sequence[str]) -> np.ndarray:
        """Return a caption of each class as token ids. Raises InputError if two are equal."""
        encoded, _ = ids([self._captioned(name) for name in classes])
        first: dict[bytes, str] = {}
        for name, row in zip(classes, encoded, strict=True):
            if (other := first.setdefault(row.tobytes(), name)) != name:
                problem = f"the captions of the classes {other} and {name} are the same {self._tokens} tokens"
                raise InputError(problem, f"{WHERE}.tokens", "raise it, or change caption or classes")
        return encoded

    def open(self, folder: str) -> None:
        """Read from the prepared `folder` from now on. Raises InputError if it is missing."""
        self._about = DataFolder(folder).read_json(INDEX) or {}
        if "sums" not in self._about:
            raise InputError("the prepared images are gone", folder, "prepare them again: start another run")
        self._folder = Path(folder)
        self._ends = np.cumsum(self._about["parts"]).tolist()
        self._maps: dict[str, np.ndarray] = {}
        self._labels, self._classes = self._array("labels"), self._array("classes")

    def __len__(self) -> int:
        """Return the number of prepared images."""
        return int(self._about["count"])

    def sample(self, number: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return an image for training, with random crop, mirroring and noise from `rng`."""
        pixels, caption = self._read(number)
        if self._crop < 1.0:
            pixels = _cut_out(pixels, self._crop, rng)
        if self._mirror and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return self._beside(pixels, caption, number, rng)

    def held_out(self, number: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return an image without crop or mirroring."""
        return self._beside(*self._read(number), number, rng)

    def of_set(self) -> dict[str, Any]:
        """Return a caption of each class, `classes` [classes, tokens]; empty without any."""
        return {} if self._classes is None else {"classes": self._classes}

    def limits(self) -> dict[str, int]:
        """Return an exclusive upper bound of the token ids. Raises InputError if the tokenizer cannot be read."""
        prepared = str(self._folder) if self._about else ""
        return {"caption": self._texts.size(prepared)} if self._tokens else {}

    def export(self, prepared: str, folder: str) -> None:
        """Write an image processor and a tokenizer for transformers to `folder`, which produce these samples."""
        mean, std = (value.ravel().tolist() for value in (self._mean, self._std))
        each = [value * self._channels if len(value) == 1 else value for value in (mean, std)]
        processor = processor_config(self._size, self._channels, *each)
        write_inputs(folder, processor, self._texts.tokenizer(prepared), self._tokens)

    def _beside(
        self, pixels: np.ndarray, caption: np.ndarray | None, number: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        scaled = pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255.0)
        result: dict[str, Any] = {"pixels": (scaled - self._mean) / self._std}
        if caption is not None:
            result["caption"] = caption
        if self._labels is not None:
            result["label"] = self._labels[number]
        if self._patches:
            result["noise"] = rng.random(self._patches, np.float32)
        return result

    def _read(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return an image and its caption, verified. Raises InputError if they are damaged."""
        pixels = self._row(PART, number)
        caption = self._row(CAPTIONS, number) if self._tokens else None
        if sum_of(pixels, caption) != int(self._row(SUMS, number)):
            raise self._damaged()
        return pixels, caption

    def _damaged(self) -> InputError:
        return InputError(
            "has changed since it was prepared", str(self._folder), "remove it: it is then made again"
        )

    def _row(self, kind: str, number: int) -> np.ndarray:
        part = bisect_right(self._ends, number)
        name = part_name(kind, part)
        if name not in self._maps:
            self._maps[name] = open_memmap(self._folder / name, mode="r")
        return np.asarray(self._maps[name][number - (self._ends[part - 1] if part else 0)])

    def _array(self, name: str) -> np.ndarray | None:
        """Return a small array, verified; None if it was not written. Raises InputError if it is damaged."""
        digest = self._about["sums"].get(name)
        path = self._folder / f"{name}.npy"
        if digest is None:
            return None
        if not path.is_file() or xxhash.xxh3_64_hexdigest(path.read_bytes()) != digest:
            raise self._damaged()
        return np.array(open_memmap(path, mode="r"))

    def _decoded(self, rejected: Rejected) -> Iterator[tuple[RawImage, np.ndarray]]:
        """Yield the usable images in order."""
        images = self._source.read(rejected)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            while some := list(islice(images, AT_ONCE)):
                for image, pixels in zip(some, pool.map(self._decode, some), strict=True):
                    try:
                        if isinstance(pixels, Unfit):
                            raise pixels
                        yield self._with_class(image, rejected), pixels
                    except Unfit as unfit:
                        rejected.refuse(image.file, unfit, image.row)

    def _decode(self, image: RawImage) -> np.ndarray | Unfit:
        try:
            return decoded(image.data, self._size, self._channels)
        except Unfit as error:
            return error

    def _with_class(self, image: RawImage, rejected: Rejected) -> RawImage:
        """Return the image with its class name, and with the class's caption if it has none of its own. Classes that
        files give by their numbers are counted in `rejected`.

        Raises Unfit for an unknown class, and for a missing caption if captions are required.
        """
        label = image.label
        caption = image.caption
        if label is not None and self._named:
            try:
                name = self._named[self._known.number_of(label)]
            except Unfit:
                problem = f"has the class {label!r}, which is not in options.classes"
                raise Unfit("class", problem) from None
            if name != label:
                rejected.note(image.file, "label", BY_NUMBER, image.row)
            label = name
        if caption is None and self._caption and label is not None:
            caption = self._captioned(label)
        if self._tokens and caption is None:
            raise Unfit("caption", "has no caption", "give it one, or set caption for all")
        return image._replace(label=label, caption=caption)

    def _captioned(self, name: str) -> str:
        return self._caption.replace("{}", name)

    def _check_one_kind(self, classes: Sequence[str]) -> None:
        """Raise InputError if an archive gives some classes by name and others by number, and the job names none.

        A number could be a name or an index.
        """
        numbers = [name for name in classes if name.isdecimal()]
        names = [name for name in classes if not name.isdecimal()]
        if self._named or not self._source.is_tar or not numbers or not names:
            return
        problem = f"names some classes ({names[0]}) and numbers others ({numbers[0]})"
        raise InputError(problem, f"{WHERE}.uri {self._source.uri}", "name all classes in options.classes")

    def _check_rejected(self, totals: Mapping[str, Mapping[str, int]], count: int) -> None:
        if self._limit is None:
            return
        out, (number, share) = sum(totals.get(LEFT_OUT, {}).values()), ceiling_of(self._limit)
        if out > (number if number is not None else (share or 0.0) * (out + count)):
            problem = f"{out} of {out + count} images are left out"
            raise InputError(problem, f"{WHERE}.max_rejected {self._limit}", "fix them, or raise it")


def _cut_out(pixels: np.ndarray, min_area: float, rng: np.random.Generator) -> np.ndarray:
    """Return a random square of at least `min_area` of the area, scaled to the full size."""
    from PIL import Image

    size = len(pixels)
    side = max(1, round(size * rng.uniform(min_area, 1.0) ** 0.5))
    top, left = rng.integers(0, size - side + 1, 2)
    part = np.ascontiguousarray(pixels[top : top + side, left : left + side])
    image = Image.fromarray(part[..., 0] if part.shape[-1] == 1 else part)
    scaled = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(scaled, np.uint8).reshape(pixels.shape)
