"""Images of a folder or of WebDataset archives with their classes and captions.

They are read in a fixed order and decoded to arrays of one size.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.sources import Span, resolve, tar_rows
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.rows import opened_sound
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.read_at_once import AT_ONCE, read_at_once
from orchestrator.storage.retry import Retry

if TYPE_CHECKING:
    from PIL import Image

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are decoded, whatever a file's name says. Pillow knows more, and runs external programs for some."""
PIXELS = 2**27
"""Maximum pixels of an image, which takes three bytes for each while it is decoded."""
CAPTION = "txt"
CLASS = "cls"
CAPTION_BYTES = 2**16
ON_ERROR = "data.samples.options.on_error"
TARS = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tgz")


class RawImage(NamedTuple):
    """An image before decoding.

    Attributes:
        data: bytes of the image file.
        label: name of its class; None without one.
        caption: its caption; None without one.
        file, row: where it is; `row` is the number of an archive's row.
    """

    data: bytes
    label: str | None
    caption: str | None
    file: SourceFile
    row: int | None


class ImageSource:
    """The images at `uri`: a folder, or one or more archives by path or glob. Raises InputError."""

    def __init__(self, uri: str, on_error: str, where: str) -> None:
        self.uri = uri
        self._on_error = on_error
        self._where = where
        self.is_tar = uri.lower().endswith(TARS)

    def read(self, rejected: Rejected) -> Iterator[RawImage]:
        """Yield all images in the order of their names, or of the archive.

        Files that are no images go to `rejected`.
        """
        return self._in_tars(rejected) if self.is_tar else self._in_folder(rejected)

    def fingerprint(self) -> str:
        """Return a checksum of the names and contents of all files."""
        digest = xxhash.xxh3_128()
        if self.is_tar:
            for file in self._archives():
                digest.update(f"{file.content} {file.size}\n".encode())
            return digest.hexdigest()
        files, folder = self._files()
        for name, data in zip(files, self._contents(folder, files), strict=True):
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
        return digest.hexdigest()

    def _archives(self) -> list[SourceFile]:
        columns = {each: each for name in (*IMAGES, CAPTION, CLASS) for each in (name, name.upper())}
        source = Source(uri=self.uri, format="tar", field=columns)
        return resolve([source], self._where, self._on_error)

    def _in_tars(self, rejected: Rejected) -> Iterator[RawImage]:
        for file in self._archives():
            span = Span(file, 0, file.size, file.size)
            with opened_sound(span, rejected, checked=file.on_error != "fail") as plain:
                for row, values in tar_rows.read(span, plain, rejected, 0, ()):
                    try:
                        yield _of_row(values, file, row)
                    except Unfit as error:
                        rejected.refuse(file, error, row)

    def _files(self) -> tuple[list[str], tuple[Any, str]]:
        """Return the sorted names of all files below the folder that are not hidden, and the file system and path to
        read them.
        """
        try:
            fs, root = open_file_system(self.uri, TIMEOUT)
            entries = Retry()(fs.find, root)
        except Exception as error:  # every fsspec backend raises its own errors
            raise InputError(f"cannot be listed ({error})", f"{self._where} {self.uri}", "check it") from None
        names = sorted(path[len(root) :].strip("/") for path in entries)
        names = [name for name in names if name and not any(p.startswith(".") for p in name.split("/"))]
        if not names:
            raise InputError("is not a folder with images", f"{self._where} {self.uri}", "check the path")
        return names, (fs, root.rstrip("/"))

    def _contents(self, folder: tuple[Any, str], names: Iterable[str]) -> Iterator[bytes]:
        """Yield the contents of the files in this order."""
        return read_at_once(partial(self._bytes, folder), names, held=2 * AT_ONCE)

    def _bytes(self, folder: tuple[Any, str], name: str) -> bytes:
        fs, root = folder
        try:
            data: bytes = Retry()(fs.cat_file, f"{root}/{name}")
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", f"{root}/{name}", "check it") from None
        return data

    def _in_folder(self, rejected: Rejected) -> Iterator[RawImage]:
        names, folder = self._files()
        paths = [PurePosixPath(name) for name in names]
        captions = {str(path.with_suffix("")): path for path in paths if _kind(path) == CAPTION}
        alone = captions.keys() - {str(path.with_suffix("")) for path in paths if _kind(path) in IMAGES}
        images = [path for path in paths if _kind(path) in IMAGES]
        beside = ((captions.get(str(path.with_suffix(""))), path) for path in images)
        contents = self._contents(folder, (str(path) for pair in beside for path in pair if path))
        for path in paths:
            stem = str(path.with_suffix(""))
            kind = _kind(path)
            if kind == CAPTION and stem not in alone:
                continue
            file = SourceFile(
                0, f"{folder[1]}/{path}", kind=".image", size=0, content="", field="", on_error=self._on_error
            )
            try:
                if kind == CAPTION:
                    raise Unfit("caption", "is a caption without an image of the same name")
                if kind not in IMAGES:
                    raise Unfit("type", f"is not an image by the end of its name ({path.suffix})")
                caption = next(contents) if stem in captions else None
                data = next(contents)
                label = path.parts[0] if len(path.parts) > 1 else None
                yield RawImage(data, label, _text(caption), file, None)
            except Unfit as error:
                rejected.refuse(file, error)


def decoded(data: bytes, size: int, channels: int) -> np.ndarray:
    """Decode an image to uint8 [size, size, channels].

    As in transformers' CLIPImageProcessor, the shorter side is scaled to `size` and the middle is cut out. Transparent
    pixels become white. An animation gives its first image.

    Raises Unfit if the image cannot be decoded completely, or not in a reproducible way.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            _check_image(*opened.size, opened.mode)
            image = _on_white(_of_8_bits(_turned(opened))).convert("L" if channels == 1 else "RGB")
            image = _middle(image, size)
    except Unfit:
        raise
    except UnidentifiedImageError:
        raise Unfit("image", f"cannot be decoded (its format is not one of {', '.join(FORMATS)})") from None
    except Exception as error:  # the decoder of each format raises its own errors
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise Unfit("image", f"cannot be decoded ({reason})") from None
    return np.asarray(image, np.uint8).reshape(size, size, channels)


def _check_image(width: int, height: int, mode: str) -> None:
    """Raise Unfit for an image that takes too much memory, or whose numbers have no known range."""
    if width * height > PIXELS:
        raise Unfit("large", f"has {width} x {height} pixels, more than {PIXELS}", "scale it down")
    if mode in ("I", "F"):
        problem = f"has 32-bit numbers (mode {mode}), whose value for white is unknown"
        raise Unfit("image", problem, "save it with 8 or 16 bits")


def _turned(image: Image.Image) -> Image.Image:
    """Rotate the image as its camera was held, if its metadata can be read."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # parsers of metadata raise many kinds of errors; errors in pixels recur later
        return image


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit values to 8 bits. Pillow would clip them at 255, which makes an image white."""
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    return Image.fromarray(((np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """Put an image with transparency on a white ground."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    from PIL import Image

    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _middle(image: Image.Image, size: int) -> Image.Image:
    """Scale an image so that its shorter side is `size`, and return the square in its middle.

    If the scaled image of a narrow one would exceed PIXELS, only the square is scaled, which rounds a few pixels
    differently.
    """
    from PIL import Image

    short = min(image.size)
    new = [int(size * side / short) for side in image.size]
    left, top = ((side - size) // 2 for side in new)
    if new[0] * new[1] <= PIXELS:
        scaled_image = image.resize((new[0], new[1]), Image.Resampling.BICUBIC)
        return scaled_image.crop((left, top, left + size, top + size))
    across, down = (side / scaled for side, scaled in zip(image.size, new, strict=True))
    box = left * across, top * down, (left + size) * across, (top + size) * down
    return image.resize((size, size), Image.Resampling.BICUBIC, box)


def _of_row(values: dict[str, Any], file: SourceFile, row: int) -> RawImage:
    """Return the image of an archive's row. Raises Unfit for a row with no image, or with several."""
    members = values
    values = {name.lower(): value for name, value in values.items()}
    if len(values) < len(members):
        raise Unfit("duplicate", f"{members['__key__']} has a member twice, in capitals too")
    kinds = [kind for kind in IMAGES if kind in values]
    if len(kinds) != 1:
        after = f"none of {', '.join(IMAGES)} after the first dot of a name"
        problem = f"several images ({', '.join(kinds)})" if kinds else f"no image: {after}"
        raise Unfit("type", f"{values['__key__']} has {problem}")
    data = values[kinds[0]]
    label, caption = (_text(values.get(kind)) for kind in (CLASS, CAPTION))
    return RawImage(data.encode() if isinstance(data, str) else data, label, caption, file, row)


def _kind(path: PurePosixPath) -> str:
    return path.suffix[1:].lower()


def _text(value: str | bytes | None) -> str | None:
    """Return a caption or class as text; None without any. Raises Unfit if it is not text."""
    if value is None:
        return None
    if len(value) > CAPTION_BYTES:
        raise Unfit(
            "caption", f"has a caption of {len(value)} bytes, more than {CAPTION_BYTES}", "shorten it"
        )
    try:
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise Unfit("encoding", "has a caption that is not UTF-8", "save it as UTF-8") from None
    return text.strip() or None
