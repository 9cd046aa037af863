"""Events as spans of OpenTelemetry: one of the run, and below it one of each phase."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.redact import redact
from orchestrator.observe.sinks.config import OpenTelemetrySpec
from orchestrator.observe.sinks.sink import SinkContext
from orchestrator.storage.row_line import Row

CURSOR = "spans.json"
"""The number of the event that began the last span which was taken, in the run directory."""
TIMEOUT = 10.0
ATTRIBUTES = ("attempt", "step", "reason", "first_fault", "node", "rank", "layout_after", "lost_steps")


LIBRARY = "opentelemetry.exporter.otlp.proto.http"


def build(context: SinkContext) -> OpenTelemetrySink:
    """See `Sink`."""
    return OpenTelemetrySink(context)


class OpenTelemetrySink:
    """Sends spans. Their ids follow from the run and the numbers of its events, so a span that is sent twice is one
    span. Raises OSError if the collector refuses one."""

    last_step = sys.maxsize  # it takes no rows

    def __init__(self, context: SinkContext) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        config: OpenTelemetrySpec = context.config
        self._run = context.run
        self._name = context.job_name
        self._born = context.began
        self._identity = f"{redact(context.run.uri)} {context.began:.6f}"
        self._resource = Resource({"service.name": "orchestrator", "orchestrator.run": context.job_name})
        self._exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=TIMEOUT)
        self.last_event = int(context.run.read_json_or_empty(CURSOR).get("event", 0))
        self._open: Row | None = None  # the event of the phase that continues

    def rows(self, rows: Sequence[Row]) -> None:
        """See `Sink`; a span a step would be too many."""

    def events(self, events: Sequence[Row]) -> None:
        """See `Sink`."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans: list[Any] = []
        for event in events:
            if self._open is not None:
                spans.append(self._phase(self._open, event["time"]))
            ended = event["phase"] in ENDED
            self._open = None if ended else event
            if ended:
                spans.append(self._whole(event))
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OSError("the collector has not taken the spans")
        if events:
            # The event of an open phase is given again to the next process, which has to end its span.
            self.last_event = events[-1]["number"]
            self._run.write_json(CURSOR, {"event": self.last_event - bool(self._open)})

    def close(self) -> None:
        """See `Sink`."""
        self._exporter.shutdown()

    def _phase(self, event: Row, end: float) -> Any:
        from opentelemetry.trace import Status, StatusCode

        fault = event.get("first_fault")
        status = Status(StatusCode.ERROR, str(fault)) if fault else Status()
        return self._span(
            str(event["phase"]), event["number"], start=event["time"], end=end, status=status, event=event
        )

    def _whole(self, event: Row) -> Any:
        from opentelemetry.trace import Status, StatusCode

        failed = event["phase"] == Outcome.FAILED
        status = Status(StatusCode.ERROR, str(event.get("reason"))) if failed else Status(StatusCode.OK)
        return self._span(self._name, 0, start=self._born, end=event["time"], status=status, event=event)

    def _span(self, name: str, number: int, start: float, end: float, status: Any, event: Row) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan

        attributes = {
            f"orchestrator.{key}": event[key]
            for key in ATTRIBUTES
            if isinstance(event.get(key), str | int | float)
        }
        return ReadableSpan(
            name,
            self._context(number),
            self._context(0) if number else None,
            self._resource,
            attributes,
            status=status,
            start_time=int(start * 1e9),
            end_time=int(max(end, start) * 1e9),
        )

    def _context(self, number: int) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        trace, span = (
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:size])
            for text, size in ((self._identity, 16), (f"{self._identity} {number}", 8))
        )
        return SpanContext(trace, span, False, TraceFlags(TraceFlags.SAMPLED))
