"""Lists by rank in the rows of steps. A row of 16,384 ranks would have some 300 kB of them."""

from __future__ import annotations

from orchestrator.storage.row_line import Row

LISTED = 128
"""Numbers that a row has in each of its lists, in the mean. The lists of larger gangs are left out of most rows."""
BUSY, MEMORY = "busy_seconds", "memory_bytes_by_rank"


class RankLists:
    """Leaves the lists by rank out of the rows of a gang with more than LISTED ranks, but for the first row of an
    attempt and one in so many that a row has LISTED numbers in the mean.
    """

    def __init__(self) -> None:
        self._attempt = 0
        """The attempt of the last row with lists."""
        self._memory: list[int] = []
        """The last peaks by rank that no row has."""

    def thin(self, row: Row) -> Row:
        """Return the row as it is to be stored. Call it for each row, in order."""
        memory = row.get(MEMORY) or (self._memory if row["attempt"] == self._attempt else [])
        every = -(-max(len(row.get(BUSY) or ()), len(memory)) // LISTED)
        if row["attempt"] == self._attempt and every > 1 and row["step"] % every:
            self._memory = memory
            return {key: value for key, value in row.items() if key not in (BUSY, MEMORY)}
        self._attempt, self._memory = row["attempt"], []
        return {**row, MEMORY: memory} if memory else row
