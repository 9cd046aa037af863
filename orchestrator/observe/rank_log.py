"""The output of a run's ranks in its run directory, `logs/attempt-1/rank-0.log` and so on, and of its controllers,
`logs/controller/20261123141500.log`, each named by its start (UTC).
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator, Set

from cluster.workers.rank_output import OutputTarget, log_of
from orchestrator.config.redact import redact
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.text_log import TextLog, TextLogs

LOGS = "logs"
"""The folder of all logs in a run directory."""
ATTEMPT = "attempt-"
EVALUATION = "evaluation-"
EXTRA_WORKERS = {"rollout": "rollouts-", "teacher": "teacher-"}
CONTROLLER = "controller"

KEPT = 100
"""Number of attempts whose logs are kept: the newest ones with output. The same number of controllers is kept."""


class RankLog:
    """The `cluster.workers.rank_output.Writer` of a run directory. It hides secrets, and an attempt's first line
    removes the logs of old attempts.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._log = TextLog(folder, name)
        self._all = TextLogs(posixpath.dirname(folder))
        self._of_controller = posixpath.basename(folder) == CONTROLLER
        self._begun = False

    def append(self, data: bytes) -> None:
        """See `TextLog.append`."""
        if not self._begun:
            self._begun = True
            if self._of_controller:
                self._all.inside(CONTROLLER).keep(KEPT - 1)
            else:
                for attempt in attempts_in(self._all)[:-KEPT]:
                    self._all.remove(f"{ATTEMPT}{attempt}")
        self._log.append(redact(data.decode(errors="replace")).encode(errors="replace"))


def output_of_attempt(run: str, attempt: int) -> OutputTarget:
    """Return where the ranks of an attempt of the run at that URI write their output."""
    return _output(run, f"{ATTEMPT}{attempt}")


def output_of_evaluation(run: str, step: int) -> OutputTarget:
    """Return where the extra worker that evaluates the commit of that step writes its output."""
    return _output(run, f"{EVALUATION}{step}")


def output_of_extra_worker(run: str, kind: str, number: int) -> OutputTarget:
    """Return where a worker of a kind, "rollout" or "teacher", writes its output. `number` counts them."""
    return _output(run, f"{EXTRA_WORKERS[kind]}{number}")


def output_of_controller(run: str) -> tuple[OutputTarget, str]:
    """Return where a controller that starts now writes its output, and the name of the file."""
    return _output(run, CONTROLLER), f"{time.strftime('%Y%m%d%H%M%S', time.gmtime())}.log"


def _output(run: str, folder: str) -> OutputTarget:
    return OutputTarget(f"{__name__}:{RankLog.__name__}", posixpath.join(run, LOGS, folder))


def attempts_of(run: RunDir) -> list[int]:
    """Return the attempts with output, in order. Raises OSError and errors of the store's client."""
    return attempts_in(TextLogs(run.at(LOGS)))


def attempts_in(logs: TextLogs) -> list[int]:
    """Return the attempts that have a folder, in order."""
    names = logs.folders()
    return sorted(int(name.removeprefix(ATTEMPT)) for name in names if name.startswith(ATTEMPT))


class LogReader:
    """Reads the texts of one folder of logs, during the run or later."""

    def __init__(self, run: RunDir, folder: str, names: Set[str] = frozenset()) -> None:
        """Read the texts in `names`; all texts if it is empty."""
        self._texts = TextLogs(run.at(f"{LOGS}/{folder}"))
        self._names = names
        self._read: dict[str, tuple[int, int]] = {}
        self._begun: dict[str, bytes] = {}

    def new_lines(self, last: bool = False) -> Iterator[tuple[str, str]]:
        """Return name and line of everything written since the last call, text by text.

        With `last`, includes lines without an end. Raises OSError and errors of the store's client.
        """
        for name, numbers in self._texts.parts().items():
            if self._names and name not in self._names:
                continue
            data, part, at = self._texts.read(name, numbers, *self._read.get(name, (0, 0)))
            self._read[name] = part, at
            *lines, rest = (self._begun.get(name, b"") + data).split(b"\n")
            if last and rest:
                lines = [*lines, rest]
                rest = b""
            self._begun[name] = rest
            yield from ((name, line.decode(errors="replace")) for line in lines)


class AttemptLog:
    """Reads the output of one attempt's ranks, during the run or later."""

    def __init__(self, run: RunDir, attempt: int, ranks: Set[int] = frozenset()) -> None:
        """Read these `ranks`; all ranks if it is empty."""
        self._reader = LogReader(run, f"{ATTEMPT}{attempt}", {log_of(rank) for rank in ranks})

    def new_lines(self, last: bool = False) -> Iterator[tuple[int, str]]:
        """Return rank and line, see `LogReader.new_lines`."""
        for name, line in self._reader.new_lines(last):
            yield int(name.removeprefix("rank-").removesuffix(".log")), line
