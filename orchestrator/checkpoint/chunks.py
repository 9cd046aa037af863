"""The chunks of a commit's tensors: tables that are read when they are needed, and checked then.

A table has the chunks of consecutive tensors, by tensor and then by start, see `compact`. A rank that loads a part of
the model reads the tables of its tensors only.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.checkpoint.compact import FIXED, LARGEST, SUM_BYTES, Kind
from orchestrator.checkpoint.shard import ITEM_BYTES
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.checkpoint.compact import Numbers, Sums

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the extent of a part of a tensor."""
FEW = 8
"""Boxes that are compared in Python, because arrays cost more."""
DENSE = 16
"""Cells of the grid of all edges, for each box, up to which the grid is counted. Layouts have about one."""


def tiling_problem(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Return why boxes (start, extent) do not tile `shape` exactly; empty if they do.

    Boxes tile the shape if they lie inside it, do not overlap, and their volumes add up to its volume. A sweep over the
    first dimension avoids comparing all pairs.

    Args:
        shape: of the tensor.
        boxes: the start and the extent of each.
    """
    for start, extent in boxes:
        if not len(start) == len(extent) == len(shape):
            return f"a chunk of {list(extent)} at {list(start)} in a tensor of {list(shape)}"
        if any(at + size > dimension for at, size, dimension in zip(start, extent, shape, strict=True)):
            return f"a chunk of {list(extent)} at {list(start)} reaches outside {list(shape)}"
    volume = sum(math.prod(extent) for _, extent in boxes)
    open_boxes: list[Box] = []
    for start, extent in sorted(box for box in boxes if math.prod(box[1])):
        # Boxes are sorted by start: one that ends before this one begins along the first dimension overlaps no later
        # box either.
        open_boxes = [box for box in open_boxes if not shape or box[0][0] + box[1][0] > start[0]]
        for other, size in open_boxes:
            spans = zip(start, extent, other, size, strict=True)
            if all(a < b + lb and b < a + la for a, la, b, lb in spans):
                return f"chunks at {list(other)} and {list(start)} overlap"
        open_boxes.append((start, extent))
    if volume != math.prod(shape) or not boxes:
        return f"chunks hold {volume} of {math.prod(shape)} elements"
    return ""


def tiles_as_grid(shape: tuple[int, ...], starts: Numbers, extents: Numbers) -> bool:
    """Whether boxes are seen to tile `shape` exactly, by counting the boxes over each cell between their edges.

    False also if the grid has too many cells to count: `tiling_problem` tells then. The boxes lie inside the shape.

    Args:
        shape: the shape of the tensor.
        starts: of shape (dimensions, boxes).
        extents: the same.
    """
    import numpy as np

    nonempty = (extents > 0).all(axis=0)
    starts = starts[:, nonempty]
    extents = extents[:, nonempty]
    # In fp64 first, because a product of damaged extents may overflow int64.
    if extents.prod(axis=0, dtype=np.float64).sum() > LARGEST:
        return False
    if int(extents.prod(axis=0).sum()) != math.prod(shape):
        return False
    lows = []
    highs = []
    cells = []
    for start, extent in zip(starts, extents, strict=True):
        edges = np.unique(np.concatenate([start, start + extent]))
        if len(edges) > 2:  # a dimension that is not cut does not count
            lows.append(np.searchsorted(edges, start))
            highs.append(np.searchsorted(edges, start + extent))
            cells.append(len(edges))
    if math.prod(cells) > DENSE * (starts.shape[1] + DENSE):
        return False
    # A difference array in each dimension: every box adds +1 and -1 at its corners, and running sums then give the
    # number of boxes over each cell. This costs boxes + cells, where comparing pairs would cost boxes squared.
    over = np.zeros(cells, np.int64)
    for ends in itertools.product((0, 1), repeat=len(cells)):
        corner = tuple((lows, highs)[end][number] for number, end in enumerate(ends))
        np.add.at(over, corner, -1 if sum(ends) % 2 else 1)
    for axis in range(len(cells)):
        over = over.cumsum(axis=axis)
    # As the volumes add up to that of the shape, no cell is empty if none has two boxes.
    return bool((over <= 1).all()) if cells else starts.shape[1] <= 1


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, which is stored contiguously in one file."""

    file: str
    offset: int
    """The first byte in the file."""
    start: tuple[int, ...]
    """The offset of the box in the tensor, for each dimension."""
    shape: tuple[int, ...]
    """The extent of the box."""
    blocks: tuple[bytes, ...]
    """The checksum of each block."""


@dataclass(frozen=True)
class FileEntry:
    """A shard file: its size in bytes, and the size and checksum of its header. Chunks cover the rest."""

    size: int
    header_bytes: int
    header: bytes


class ShardFiles:
    """The shard files of a commit, in the order in which tables number them.

    Attributes:
        entries: the files by name.
        names: their names.
        block_bytes: bytes of a chunk that one checksum covers.
    """

    def __init__(self, entries: dict[str, FileEntry], block_bytes: int) -> None:
        self.entries = entries
        self.names = list(entries)
        self.block_bytes = block_bytes

    @cached_property
    def sizes(self) -> Numbers:
        """The bytes of each file."""
        import numpy as np

        return np.array([entry.size for entry in self.entries.values()], np.int64)


class ChunkTable:
    """The chunks of consecutive tensors.

    Attributes:
        kinds: the tensors.
        load: reads the columns and the checksums, see `compact.unpack`; called once.
    """

    def __init__(
        self, kinds: Sequence[Kind], files: ShardFiles, where: str, load: Callable[[], tuple[Numbers, Sums]]
    ) -> None:
        """`where` names the commit in messages."""
        self.kinds = kinds
        self.load = load
        self._files = files
        self._where = where
        self._lock = threading.Lock()
        self._columns: Numbers | None = None

    @property
    def columns(self) -> Numbers:
        """The numbers of all chunks, see `compact`.

        Raises:
            CorruptCommit: the stored bytes are missing or damaged.
            InputError: they contradict themselves or the rest of the manifest.
        """
        with self._lock:  # so that many threads load it once
            if self._columns is None:
                self._columns = self._loaded()
            return self._columns

    def _loaded(self) -> Numbers:
        try:
            columns, self._sums = self.load()
            problem = (
                self._order_problem(columns) or self._place_problem(columns) or self._tiling_problem(columns)
            )
        except ValueError as error:
            problem = str(error)
        except MemoryError:
            problem = "a table of chunks takes more memory than there is"
        if problem:
            raise InputError(problem, self._where, "do not use this commit")
        return columns

    @cached_property
    def bytes_of(self) -> Numbers:
        """The bytes of each chunk."""
        return self._bytes_of(self.columns)

    @cached_property
    def first_block(self) -> Numbers:
        """The number of each chunk's first checksum, and then the number of all."""
        import numpy as np

        blocks = -(-self.bytes_of // self._files.block_bytes)
        return np.concatenate([np.zeros(1, np.int64), blocks.cumsum()])

    def rows_of(self, number: int) -> range:
        """Return the numbers of the chunks of tensor `number`."""
        import numpy as np

        low, high = np.searchsorted(self.columns[0], [number, number + 1]).tolist()
        return range(low, high)

    def overlapping(self, number: int, box: Box) -> list[int]:
        """Return the numbers of the chunks of tensor `number` that hold a part of `box`.

        Args:
            number: of the tensor in the table.
            box: its start and its extent.
        """
        import numpy as np

        rows = self.rows_of(number)
        starts, extents = self._boxes(self.columns[:, rows.start : rows.stop], len(box[0]))
        # [dimensions, 1] against [dimensions, chunks]: two boxes overlap if they do in every dimension, and neither is
        # empty.
        begin, extent = (np.array(each, np.int64)[:, None] for each in box)
        is_in = (starts < begin + extent) & (begin < starts + extents) & (extent > 0) & (extents > 0)
        return [rows.start + int(row) for row in np.flatnonzero(is_in.all(axis=0))]

    def chunk(self, row: int) -> Chunk:
        """Return a chunk by its number."""
        tensor, file, offset, *numbers = self.columns[:, row].tolist()
        dimensions = len(self.kinds[tensor][2])
        # Columns of a table have as many dimensions as its largest tensor; smaller ones are padded, see `PieceTable`.
        padded = len(numbers) // 2
        low, high = self.first_block[row : row + 2].tolist()
        sums = self._sums[low:high].tobytes()
        return Chunk(
            self._files.names[file],
            offset,
            tuple(numbers[:dimensions]),
            tuple(numbers[padded : padded + dimensions]),
            tuple(sums[at : at + SUM_BYTES] for at in range(0, len(sums), SUM_BYTES)),
        )

    def _bytes_of(self, columns: Numbers) -> Numbers:
        import numpy as np

        items = np.array([ITEM_BYTES[dtype] for _, dtype, _ in self.kinds], np.int64)
        _, extents = self._boxes(columns, (len(columns) - FIXED) // 2)
        return extents.prod(axis=0, dtype=np.int64) * items[columns[0]]

    def _boxes(self, columns: Numbers, dimensions: int) -> tuple[Numbers, Numbers]:
        """The starts and the extents, of shape (dimensions, chunks)."""
        padded = (len(columns) - FIXED) // 2
        return columns[FIXED : FIXED + dimensions], columns[FIXED + padded : FIXED + padded + dimensions]

    def _order_problem(self, columns: Numbers) -> str:
        """Return whether the chunks are not those of the tensors, in order; empty if they are."""
        import numpy as np

        tensors = columns[0]
        present = np.unique(tensors)
        if len(present) != len(self.kinds) or (len(present) and int(present[-1]) != len(self.kinds) - 1):
            return f"a table of chunks has {len(present)} tensors and should have {len(self.kinds)}"
        if (np.diff(tensors) < 0).any():
            return "a table of chunks is not in order"
        if len(tensors) and int(columns[1].max()) >= len(self._files.names):
            return "a chunk is in a file that is not a shard of this commit"
        return ""

    def _place_problem(self, columns: Numbers) -> str:
        """Return which chunk is not inside its tensor and its file; empty if all are."""
        import numpy as np

        dimensions = (len(columns) - FIXED) // 2
        if any(len(shape) > dimensions for _, _, shape in self.kinds):
            return "a table of chunks has fewer dimensions than its tensors"
        shapes = np.array(
            [(*shape, *[1] * (dimensions - len(shape))) for _, _, shape in self.kinds], np.int64
        ).reshape(len(self.kinds), dimensions)
        starts, extents = self._boxes(columns, dimensions)
        outside = (starts + extents > shapes[columns[0]].T).any(axis=0)
        if outside.any():
            name, _, shape = self.kinds[int(columns[0][outside][0])]
            at, size = (each[:, outside][: len(shape), 0].tolist() for each in (starts, extents))
            return f"{name}: a chunk of {size} at {at} reaches outside {list(shape)}"
        sizes = self._bytes_of(columns)
        beyond = columns[2] + sizes > self._files.sizes[columns[1]]
        if beyond.any():
            tensor, file, offset = (int(column[beyond][0]) for column in columns[:FIXED])
            name = self.kinds[tensor][0]
            return (
                f"{name}: its {int(sizes[beyond][0])} bytes at {offset} are more than "
                f"{self._files.names[file]} holds"
            )
        blocks = int((-(-sizes // self._files.block_bytes)).sum())
        if blocks != len(self._sums):
            return f"{self.kinds[0][0]}: {len(self._sums)} checksums for {blocks} blocks"
        return ""

    def _tiling_problem(self, columns: Numbers) -> str:
        """Return which tensor its chunks do not tile; empty if all are tiled."""
        import numpy as np

        edges = np.searchsorted(columns[0], np.arange(len(self.kinds) + 1)).tolist()
        for (name, _, shape), low, high in zip(self.kinds, edges, edges[1:], strict=False):
            starts, extents = self._boxes(columns[:, low:high], len(shape))
            if high - low > FEW and tiles_as_grid(shape, starts, extents):
                continue
            boxes = list(zip(map(tuple, starts.T.tolist()), map(tuple, extents.T.tolist()), strict=True))
            if problem := tiling_problem(shape, boxes):
                return f"{name}: {problem}"
        return ""


class Chunks:
    """The chunks of one tensor, which are read from their table when they are needed."""

    def __init__(self, table: ChunkTable, number: int) -> None:
        """`number` is that of the tensor in the table."""
        self.table = table
        self._number = number

    def __len__(self) -> int:
        return len(self.table.rows_of(self._number))

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.table.chunk, self.table.rows_of(self._number))

    def overlapping(self, box: Box) -> Iterator[Chunk]:
        """Return the chunks that hold a part of `box`."""
        return map(self.table.chunk, self.table.overlapping(self._number, box))


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor: its shape, its dtype by safetensors' name, and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: Chunks
