"""The parts in which prepared images are stored, and the properties of all images."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder

Encoder: TypeAlias = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""Encodes texts: returns token ids, int32 [texts, tokens], and whether each text was cut, bool [texts]."""
PART = "part"
CAPTIONS = "captions"
SUMS = "sums"


class DecodedImages:
    """The images decoded so far, written in parts of `each` images.

    Args:
        folder: the folder of the parts.
        each: maximum number of images in a part.
        ids: encodes captions; None without captions.
        is_cut: called with each caption that is too long.
        named: the classes, if they are known in advance.
    """

    def __init__(
        self,
        folder: DataFolder,
        each: int,
        ids: Encoder | None,
        is_cut: Callable[[str], None],
        named: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._each = each
        self._ids = ids
        self._is_cut = is_cut
        self._named = list(named)
        self._pixels = list[np.ndarray]()
        self._captions = list[str]()
        self._numbers = dict[str | None, int]({None: -1})
        self._labels = array("i")
        self.sizes = list[int]()

    def add(self, pixels: np.ndarray, label: str | None, caption: str) -> None:
        """Add an image."""
        self._pixels.append(pixels)
        self._labels.append(self._numbers.setdefault(label, len(self._numbers) - 1))
        if self._ids:
            self._captions.append(caption)
        if len(self._pixels) == self._each:
            self.flush()

    def flush(self) -> None:
        """Write the current part."""
        if not self._pixels:
            return
        part = len(self.sizes)
        captions = None
        self._folder.write(part_name(PART, part), npy(np.stack(self._pixels)))
        if self._ids:
            captions, cut = self._ids(self._captions)
            for number in np.flatnonzero(cut):
                self._is_cut(self._captions[number])
            self._folder.write(part_name(CAPTIONS, part), npy(captions))
        sums = [
            sum_of(row, captions[i] if captions is not None else None) for i, row in enumerate(self._pixels)
        ]
        self._folder.write(part_name(SUMS, part), npy(np.array(sums, np.uint64)))
        self.sizes.append(len(self._pixels))
        self._pixels = []
        self._captions = []

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self._labels)

    @property
    def classes(self) -> list[str]:
        """The class names by number: as given, else sorted, numerically if all are numbers; empty if no image has a
        class.
        """
        result = [name for name in self._numbers if name is not None]
        if self._named:
            return self._named if result else []
        return sorted(
            result, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, result)) else None
        )

    @property
    def labels(self) -> np.ndarray:
        """The class of each image as an index into `classes`, int32 [images]; -1 for none."""
        index_of_class = {name: index for index, name in enumerate(self.classes)}
        # None has the number -1, so that it is at index 0 here
        of_numbers = [-1 if name is None else index_of_class[name] for name in self._numbers]
        return np.array(of_numbers, np.int32)[np.array(self._labels, np.int32) + 1]


def sum_of(pixels: np.ndarray, caption: np.ndarray | None) -> int:
    """Return a checksum of an image and its caption."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(pixels).data)
    if caption is not None:
        digest.update(np.ascontiguousarray(caption).data)
    return digest.intdigest()


def part_name(kind: str, number: int) -> str:
    """Return the file name of a part; `kind` is PART, CAPTIONS or SUMS."""
    return f"{kind}-{number:05d}.npy"


def npy(values: np.ndarray) -> bytes:
    """Return an array in the .npy format."""
    held = io.BytesIO()
    np.save(held, values)
    return held.getvalue()
