"""An export is pushed to a stand-in of the Hub, by huggingface_hub itself."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from orchestrator.config.errors import InputError
from orchestrator.export.hub import check_push, push

TOKEN = "hf_" + "s3cr3t" * 5
PUSH = (
    "import sys; from orchestrator.export.hub import push; print(push(sys.argv[1], 'me/model', private=True))"
)

FOR_A_JOB = PUSH.replace("private=True", "private=True, must_be_private=True")


class Hub:
    """The routes of the Hub that an upload takes: https://huggingface.co/docs/hub/api."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.repo, self.files, self.tokens = refuses, {}, {}, set[str]()
        self.public = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.command == "POST":  # the client looks at public pages without a token
                    hub.tokens.add(self.headers.get("Authorization", ""))
                status, answer = hub.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Take in what comes."""
        if self.refuses:
            return 403, {"error": f"no rights for {TOKEN}"}
        if path == "/api/repos/create":
            self.repo = json.loads(body)
            return 200, {"url": f"{self.address}/me/model", "name": "me/model"}
        if path == "/api/models/me/model":
            return 200, {"id": "me/model", "private": not self.public, "siblings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {
                "files": [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files
                ]
            }
        if path.endswith("/api/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if "/commit/" in path:
            for line in body.splitlines():
                row = json.loads(line)
                if row["key"] == "file":
                    self.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                else:
                    self.message = row["value"]["summary"]
            return 200, {
                "commitUrl": f"{self.address}/me/model/commit/1",
                "commitOid": "1" * 40,
                "success": True,
            }
        return 404, {"error": path}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (place := tmp_path / "export").mkdir()
    (place / "model.safetensors").write_bytes(b"\x00\x01weights")
    (place / "README.md").write_text("---\nlibrary_name: transformers\n---\n# small\n")
    (place / "left.txt").write_text("no file of the export")
    facts = {"step": 12, "run": "small", "files": ["README.md", "model.safetensors", "export.json"]}
    (place / "export.json").write_text(json.dumps(facts))
    return place


def pushed(folder: Path, hub: Hub, code: str = PUSH) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(params=[False, True], ids=["takes", "refuses"])
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    found = Hub(request.param)
    yield found
    found.http.shutdown()
    found.http.server_close()


def test_an_export_arrives_and_the_token_is_in_no_message(folder: Path, hub: Hub) -> None:
    done = pushed(folder, hub)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr
    if hub.refuses:
        assert done.returncode == 1
        assert "--push me/model: the Hub refused the upload" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/model")
    assert (
        hub.repo.get("private") is True or hub.repo.get("visibility") == "private"
    )  # an older and a newer client
    assert set(hub.files) == {"README.md", "model.safetensors", "export.json"}
    assert hub.files["model.safetensors"] == b"\x00\x01weights"
    assert hub.message == "Step 12 of small"


@pytest.mark.parametrize("public", [False, True])
def test_a_job_pushes_to_no_repository_that_is_public_already(folder: Path, public: bool) -> None:
    """As the task after training calls it. The Hub keeps a repository that is there as it is."""
    found = Hub(refuses=False)
    found.public = public
    done = pushed(folder, found, FOR_A_JOB)
    found.http.shutdown()
    found.http.server_close()
    assert (done.returncode == 0) is not public, done.stderr
    assert bool(found.files) is not public
    assert not public or "me/model: is public, and only a private repository is pushed to" in done.stderr


def test_an_unreachable_hub_is_told_with_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(
            RuntimeError, match=r"did not accept me/model \(.*Connect.*\); the export is in"
        ) as error:
            push(str(folder), "me/model", private=True)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "repo", ["model", "a/b/c", "me/-model", "me/mo--del", "me/a..b", "me/model.git", "me/m\u00f6"]
)
def test_a_name_is_checked_before_the_export(repo: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--push .*: is not a repository of the Hub.*; write it as USER/NAME"
    ):
        check_push(repo, str(tmp_path))
