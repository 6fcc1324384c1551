"""Uploads to a hub: the real library, and a server on loopback that speaks its protocol."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atoll.peer.training.hf.hub import expect_can_push, push
from atoll.peer.training.one_file import ExportError

TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """A hub that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.messages: list[str] = []
        self.is_read_only = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": "Invalid credentials in Authorization header"})
        return False

    def do_GET(self) -> None:
        if self._is_known():
            found = {"name": "me"} if self.path == "/api/whoami-v2" else {"id": "me/reef"}
            self._answer(200, found)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._is_known():
            return
        if self.path == "/api/repos/create":
            self._create(json.loads(raw))
        elif "/preupload/" in self.path:
            files = json.loads(raw)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            self._answer(200, {"files": [each | {"shouldIgnore": False} for each in modes]})
        elif "/commit/" in self.path:
            self._commit(self.path.split("/models/")[1].split("/commit/")[0], raw)
        else:
            self._answer(404, {"error": self.path})

    def _create(self, asked: dict[str, Any]) -> None:
        if self.server.is_read_only:
            self._answer(403, {"error": "this token may only read"})
            return
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        visibility = asked.get("visibility", "private" if asked.get("private") else "public")
        self.server.repos.setdefault(name, {"visibility": visibility, "files": {}})
        self._answer(200, {"url": f"{self.server.address}/{name}"})

    def _commit(self, name: str, raw: bytes) -> None:
        if self.server.is_read_only:
            self._answer(403, {"error": "this token may only read"})
            return
        for line in raw.splitlines():
            told = json.loads(line)
            if told["key"] == "header":
                self.server.messages.append(told["value"]["summary"])
            else:
                value = told["value"]
                content = base64.b64decode(value["content"])
                self.server.repos[name]["files"][value["path"]] = content
        url = f"{self.server.address}/{name}/commit/abc"
        self._answer(200, {"success": True, "commitOid": "abc", "commitUrl": url})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    server = Hub()
    serving = threading.Thread(target=server.serve_forever, args=(0.02,))
    serving.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it is on loopback
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(("is_public", "visibility"), [(False, "private"), (True, "public")])
def test_a_folder_is_one_commit_of_a_repository(
    hub: Hub, exported: Path, is_public: bool, visibility: str
) -> None:
    expect_can_push("me/reef")
    url = push(exported, "me/reef", message="reef: model after round 12", is_public=is_public)
    assert url == f"{hub.address}/me/reef/commit/abc"
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    assert hub.repos == {"me/reef": {"visibility": visibility, "files": files}}
    assert hub.messages == ["reef: model after round 12"]


def test_a_file_keeps_its_name(hub: Hub, exported: Path) -> None:
    push(exported / "model.safetensors", "me/reef", message="parameters")
    assert hub.repos["me/reef"]["files"] == {"model.safetensors": b"weights"}


@pytest.mark.parametrize("repo", ["reef", "a/b/c", "me/re ef", ""])
def test_a_name_that_is_none_is_refused_first(hub: Hub, repo: str) -> None:
    with pytest.raises(ExportError, match="expected OWNER/NAME"):
        expect_can_push(repo)


def test_a_machine_that_is_not_logged_in_is_told_how(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ExportError, match="hf auth login"):
        expect_can_push("me/reef")


def test_a_wrong_token_and_one_that_only_reads_are_told(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_read_only = True
    with pytest.raises(ExportError, match=r"may write there.*; the export is in .*my-model"):
        push(exported, "me/reef", message="reef")
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(ExportError, match="the hub refuses"):
        expect_can_push("me/reef")


def test_a_hub_that_is_away_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ExportError, match="cannot be reached"):
        expect_can_push("me/reef")
