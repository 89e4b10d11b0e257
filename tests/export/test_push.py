"""Uploads: shown and confirmed first, private by default, against a stand-in for the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny_model import checkpoint, finished_run

from halftune.cli import main
from halftune.core.errors import HalftuneError
from halftune.export import push as pushing
from halftune.export.push import check_push, push


class Hub(ThreadingHTTPServer):
    """What the hub does with repositories and commits, in memory.

    Attributes:
        repos: name → whether it is private.
        files: name of a repository → its files.
        refused: answers 403 to what would change something.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused = False


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.partition("/api/models/")[2].partition("/revision/")[0].split("?")[0]
        found = name in self.server.repos
        self._send(
            {"id": name, "sha": "0" * 40, "private": self.server.repos[name]} if found else {}, 200 if found else 404
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refused:
            self._send({"error": "no write access"}, 403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.server.repos[name] = asked.get("private") or asked.get("visibility") == "private"
            self._send({"url": f"http://{self.headers['Host']}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._send({"files": [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in files]})
        elif "/commit/" in self.path:
            name = self.path.partition("/api/models/")[2].partition("/commit/")[0]
            lines = [json.loads(line) for line in body.splitlines()]
            kept = self.server.files.setdefault(name, {})
            for one in (line["value"] for line in lines if line["key"] == "file"):
                kept[one["path"]] = base64.b64decode(one["content"])
            url = f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}"
            self._send({"commitUrl": url, "commitOid": "0" * 40})
        else:
            self._send({"valid": True})

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "export"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "README.md").write_text("# mine\n")
    return place


@pytest.mark.parametrize("public", [False, True])
def test_every_file_is_uploaded(hub: Hub, folder: Path, public: bool) -> None:
    check_push("me/mine", force=False, public=public, confirmed=True)
    assert "me/mine" in push(folder, "me/mine", public=public, confirmed=True)
    assert hub.repos == {"me/mine": not public}
    assert hub.files == {"me/mine": {path.name: path.read_bytes() for path in folder.iterdir()}}


@pytest.mark.parametrize(("answer", "sent"), [("y", True), ("yes", True), ("", False), ("no", False)])
def test_nothing_is_sent_without_a_yes(
    hub: Hub, folder: Path, answer: str, sent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question + capsys.readouterr().out)
        return answer

    push(folder, "me/mine", public=False, confirmed=False, ask=ask)
    assert ("me/mine" in hub.files) == sent
    (shown,) = asked
    assert all(part in shown for part in ("config.json", "README.md", "private", "me/mine"))


def test_what_forbids_an_upload_is_told_before_the_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(repo: str = "me/mine", *, confirmed: bool = True) -> str:
        with pytest.raises(HalftuneError) as caught:
            check_push(repo, force=False, public=False, confirmed=confirmed)
        return caught.value.code

    assert code("mine") == "cli.bad_option_value"
    assert code("me/my model") == "cli.bad_option_value"
    assert code(confirmed=False) == "cli.bad_option_value"  # standard input is no terminal
    hub.repos["me/mine"] = True
    assert code() == "export.repo_exists"
    check_push("me/mine", force=True, public=False, confirmed=True)
    with monkeypatch.context() as patched:
        patched.setattr(pushing, "get_token", lambda: None)
        assert code() == "export.no_token"
    with monkeypatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert code() == "model.hub_unreachable"


def test_the_visibility_of_a_repository_that_exists(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos = {"me/public": False, "me/private": True}
    for send in (
        lambda: check_push("me/public", force=True, public=False, confirmed=True),
        lambda: push(folder, "me/public", public=False, confirmed=True),
    ):
        with pytest.raises(HalftuneError) as caught:
            send()
        assert caught.value.code == "export.repo_exists"
    assert hub.files == {}
    for repo, public in (("me/public", True), ("me/private", True), ("me/private", False)):
        check_push(repo, force=True, public=public, confirmed=True)
        said = push(folder, repo, public=public, confirmed=True) + capsys.readouterr().out
        assert said.count(f"({repo.removeprefix('me/')})") == 2
    assert hub.repos == {"me/public": False, "me/private": True}


def test_rows_of_the_users_data_stay_here(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "probes.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "probes.json").write_text("{}")
    push(folder, "me/mine", public=False, confirmed=True)
    assert hub.files["me/mine"].keys() == {"config.json", "README.md"}
    assert "probes.json" not in capsys.readouterr().out


def test_a_refusal_of_the_hub(hub: Hub, folder: Path) -> None:
    hub.refused = True
    with pytest.raises(HalftuneError) as caught:
        push(folder, "me/mine", public=False, confirmed=True)
    assert caught.value.code == "export.push_refused"


def test_on_the_command_line(hub: Hub, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", checkpoint(tmp_path / "base", vocab_size=4096))
    command = ["export", str(run), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as left:
        main([*command, "--public"])
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main([*command, "--push", "me/mine", "--yes"])
    assert left.value.code == 0
    assert hub.repos == {"me/mine": True}
    assert hub.files["me/mine"].keys() == {path.name for path in (tmp_path / "out").iterdir()}
    assert "README.md" in hub.files["me/mine"]
