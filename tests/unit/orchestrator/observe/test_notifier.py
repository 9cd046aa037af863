"""What a webhook is told of a run, and that it is told once it answers; a run never waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from sockets import silent

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.observe import notifier
from orchestrator.observe.config import NotifySpec
from orchestrator.observe.notifier import Notifier, occasion_of


class Hook:
    """A webhook that answers with these codes in turn, then with 200."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.got: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code = hook.codes.pop(0) if hook.codes else 200
                hook.got += [body] if code == 200 else []
                self.send_response(code)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0/B0/hunter2"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(notifier, "PAUSES", (0.0, 0.01, 0.01))
    found = Hook()
    yield found
    found.server.shutdown()
    found.server.server_close()


def event(phase: str = "train", **more: Any) -> dict[str, Any]:
    return {"phase": phase, "attempt": 2, "step": 7, "reason": "because", "first_fault": None, **more}


OCCASIONS: list[tuple[dict[str, Any], str | None]] = [
    (event("done"), "done"),
    (event("failed"), "failed"),
    (event("stopped"), "stopped"),
    (event("stop", cause={"end": "still"}, first_fault="no step for 9 s"), "stalled"),
    (event("stop", cause={"end": "silent"}), "stalled"),
    (event("stop", cause={"end": "lost"}, first_fault="rank 1 died"), None),
    (event(saving="failed"), "attention"),
    (event(saving="published"), None),
    (event(ceiling={"key": "hours"}), "attention"),
    (event(missing_rows=[[1, 2]]), "attention"),
    (event(missing_rows=[]), None),
    (event(controller_died=0), "attention"),
    (event(skipped=None), None),
    (event(), None),
    (event("start"), None),
]


@pytest.mark.parametrize(("happened", "occasion"), OCCASIONS)
def test_which_events_are_occasions(happened: dict[str, Any], occasion: str | None) -> None:
    assert occasion_of(happened) == occasion


def test_a_job_file_may_have_the_earlier_name_of_a_stop() -> None:
    assert NotifySpec.model_validate({"webhook": "https://a/b", "on": ["landed", "done"]}).on == (
        "stopped",
        "done",
    )


def test_a_message_says_what_slack_shows(hook: Hook) -> None:
    told = Notifier(NotifySpec(webhook=hook.url), "base", "s3://ann:hunter2@b/runs/base")
    told.event(event("stop", cause={"end": "still"}, first_fault="rank 3: no step for 9 s"))
    told.event(event("stop", cause={"end": "still"}, first_fault="again"))  # at once: no flood
    told.event(event("train"))
    told.event(event("done", reason="20 steps are done"))
    told.close(10)
    assert [list(message) for message in hook.got] == [["text"], ["text"]]
    assert hook.got[0]["text"] == (
        "base stalled at step 7 (attempt 2): rank 3: no step for 9 s; because\ns3://ann:***@b/runs/base"
    )
    assert hook.got[1]["text"].startswith("base done at step 7 (attempt 2): 20 steps are done")


def test_it_is_tried_again_where_that_helps(hook: Hook) -> None:
    hook.codes = [503, 429]
    told = Notifier(NotifySpec(webhook=hook.url), "base", "runs/base")
    told.event(event("done"))
    told.close(10)
    assert (len(hook.got), told.problem) == (1, "")
    hook.codes = [404]
    told.event(event("failed"))
    told.close(10)
    assert (len(hook.got), told.problem) == (1, "the webhook could not be reached: HTTPError")
    assert "hunter2" not in told.problem


def test_only_what_is_asked_for_is_told(hook: Hook) -> None:
    told = Notifier(NotifySpec(webhook=hook.url, on=("failed",)), "base", "runs/base")
    for phase in ("done", "failed", "stopped"):
        told.event(event(phase))
    told.close(10)
    assert len(hook.got) == 1
    nobody = Notifier(None, "base", "runs/base")
    nobody.event(event("done"))
    nobody.close(10)


def test_the_address_may_be_in_the_environment(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    lost = Notifier(NotifySpec(webhook="$HOOK"), "base", "runs/base")
    lost.event(event("done"))
    lost.close(20)
    assert lost.problem == "the webhook could not be reached: $HOOK is not set where the run's controller is"
    monkeypatch.setenv("HOOK", hook.url)
    told = Notifier(NotifySpec(webhook="$HOOK"), "base", "runs/base")
    told.event(event("done"))
    told.close(20)
    assert (len(hook.got), told.problem) == (1, "")


def test_a_webhook_that_never_answers_is_not_waited_for() -> None:
    with silent() as (address, _):
        told = Notifier(NotifySpec(webhook=f"http://{address}/x"), "base", "runs/base")
        began = time.monotonic()
        told.event(event("done"))
        assert time.monotonic() - began < 5
        told.close(0.2)
        assert time.monotonic() - began < 9


@pytest.mark.parametrize(
    ("notify", "line"),
    [
        ({"webhook": "hooks.slack.com/x"}, "notify.webhook"),
        ({"webhook": "$A-B"}, "notify.webhook"),
        ({"webhook": "http://h/x", "on": ["lunch"]}, "notify.on"),
        ({}, "notify.webhook"),
    ],
)
def test_a_wrong_job_is_refused(notify: dict[str, Any], line: str) -> None:
    document = {
        "name": "demo",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
        "train": {"steps": 5, "global_batch": 4},
    }
    with pytest.raises(InputError) as error:
        parse(document | {"notify": notify})
    assert line in str(error.value)
    same = parse(document | {"notify": {"webhook": "https://hooks.example/x"}})
    assert same.identity() == parse(document).identity()
