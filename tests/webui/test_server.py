"""A running web UI as a program meets it: who gets in, which files it serves, how it starts."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from patience import LIMIT, until

pytestmark = pytest.mark.slow


def ask(url: str, path: str = "/", method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    cookie = answer.getheader("set-cookie") or ""
    connection.close()
    return answer.status, text + cookie


def test_page_is_served_and_names_no_other_server(web_ui: Any) -> None:
    status, text = ask(web_ui.url)
    assert status == 200
    assert "halftune" in text
    assert "fonts.googleapis" not in text


def test_files_are_not_served(web_ui: Any, tmp_path: Path) -> None:
    (web_ui.folder / "private.txt").write_text("nobody's business")
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody's business")
    for name in (secret, web_ui.folder / "private.txt", "/etc/passwd", web_ui.folder / ".." / "x", Path(__file__)):
        for prefix in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/"):
            status, text = ask(web_ui.url, f"{prefix}{quote(str(name))}")
            assert status in (403, 404, 405), (prefix, name)
            assert "nobody's business" not in text


def test_other_sites_and_names_are_refused(web_ui: Any) -> None:
    body = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"})
    json_type = {"content_type": "application/json"}
    assert ask(web_ui.url, "/gradio_api/queue/join", "POST", body, origin="http://evil.example", **json_type)[0] == 403
    assert ask(web_ui.url, host="evil.example:80")[0] == 403
    port = urlsplit(web_ui.url).port
    same = {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"}
    assert ask(web_ui.url, "/gradio_api/queue/join", "POST", body, **same, **json_type)[0] != 403


def test_no_function_is_offered_to_programs(web_ui: Any) -> None:
    """The web UI is for people; programs have the command line. Nothing is listed, so nothing is found by guessing."""
    status, text = ask(web_ui.url, "/gradio_api/info")
    assert status == 200
    assert json.loads(text)["named_endpoints"] == {}


def calls(web_ui: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls that no page makes: (path, body)."""
    body = {"session_hash": "x", "event_data": None}
    unknown = {**body, "fn_index": 999, "data": []}
    yield "/gradio_api/queue/join", unknown
    yield "/gradio_api/run/predict", unknown
    yield "/gradio_api/api/nothing", {"data": []}
    for function in json.loads(ask(web_ui.url, "/config")[1].partition("access-token")[0])["dependencies"]:
        path = "/gradio_api/run/predict" if function["queue"] is False else "/gradio_api/queue/join"
        for value in (3, "x", {"path": "/etc/passwd"}):
            data = [value for _ in function["inputs"]]
            for event in (None, {}, {"act": 3, "run": None, "on": 1}, {"edits": 3, "seq": "x"}):
                if event is None or function["targets"][0][1] == "submit":
                    yield path, {**body, "fn_index": function["id"], "data": data, "event_data": event}


def test_rubbish_gets_a_line_on_the_terminal_and_no_traceback(web_ui: Any) -> None:
    before, json_type = len(web_ui.terminal.read_text()), {"content_type": "application/json"}
    sent = [ask(web_ui.url, path, "POST", json.dumps(body), **json_type)[0] for path, body in calls(web_ui)]
    assert sent[:3] == [404, 404, 404]
    assert set(sent) == {200, 404, 500}  # taken into the queue, unknown, refused

    def printed_since() -> str:
        return web_ui.terminal.read_text()[before:]

    until(lambda: "an event without act, run, on" in printed_since(), "the last line on the terminal")  # of the queue
    printed = printed_since()
    assert all(line.startswith("refused a call") for line in printed.splitlines()), printed
    assert len(printed.splitlines()) > 20
    assert ask(web_ui.url)[0] == 200


def test_password(start_web_ui: Callable[..., Any]) -> None:
    web_ui = start_web_ui("--host", "0.0.0.0", HALFTUNE_WEBUI_AUTH="me:long:password")
    url = web_ui.url
    assert url.startswith("http://127.0.0.1:")  # one that can be opened
    assert ask(url, "/config")[0] == 401
    assert ask(url, "/gradio_api/info")[0] == 401
    assert ask(url, "/gradio_api/queue/join", "POST", "{}", content_type="application/json")[0] == 401
    for outside in ("files", "hints"):
        assert ask(url, f"/halftune/{outside}")[0] == 403
    assert ask(url, "/halftune/upload/x.jsonl", "PUT", "x")[0] == 403
    for open_to_all in ("heartbeat/x", "app_id", "token"):  # without a look at the password, if it were for Gradio
        assert ask(url, f"/gradio_api/{open_to_all}")[0] == 403
    assert ask(url, "/gradio_api/upload", "POST", "", content_type="multipart/form-data; boundary=x")[0] == 403
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert ask(url, "/login", "POST", urlencode({"username": "me", "password": "long"}), **form)[0] == 400
    status, text = ask(url, "/login", "POST", urlencode({"username": "me", "password": "long:password"}), **form)
    assert status == 200
    cookie = text[text.index("access-token") :].split(";")[0]
    assert ask(url, "/config", cookie=cookie)[0] == 200
    assert ask(url, "/gradio_api/app_id", cookie=cookie)[0] == 200


def test_a_web_ui_that_nobody_looks_at_costs_nothing(web_ui: Any) -> None:
    """Gradio looks for work a thousand times a second unless it is told otherwise: 0.08 of a core.

    What is counted is how often its threads wake up by themselves: a slow machine does not do that more often.
    """
    tasks = Path(f"/proc/{web_ui.process.pid}/task")
    if not tasks.is_dir():
        pytest.skip("only Linux counts how often a process wakes up")
    assert ask(web_ui.url)[0] == 200

    def woken() -> int:
        texts = [(one / "status").read_text() for one in tasks.iterdir()]
        return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)

    def idle() -> float:
        """Wake-ups a second."""
        before, began = woken(), time.monotonic()
        time.sleep(1)
        return (woken() - before) / (time.monotonic() - began)

    assert any(idle() < 100 for _ in range(30))  # it may still work on what earlier tests have asked


def test_files_are_listed_and_taken(web_ui: Any) -> None:
    status, text = ask(web_ui.url, "/halftune/upload/rows.jsonl", "PUT", '{"text": "x"}')
    assert (status, json.loads(text)) == (200, {"path": "data/rows.jsonl", "left_out": 0})
    assert (web_ui.folder / "data" / "rows.jsonl").read_text() == '{"text": "x"}'
    assert ask(web_ui.url, "/halftune/upload/run.sh", "PUT", "x")[0] == 400
    assert ask(web_ui.url, "/halftune/upload/..%2Fx.jsonl", "PUT", "x")[0] in (400, 404)
    assert not (web_ui.folder / "x.jsonl").exists()
    listed = json.loads(ask(web_ui.url, "/halftune/files?folder=data")[1])
    assert [one["path"] for one in listed["files"]] == ["data/rows.jsonl"]
    assert ask(web_ui.url, "/halftune/files?folder=/etc")[0] == 400
    assert "data/rows.jsonl" in ask(web_ui.url, "/halftune/hints")[1]
    assert ask(web_ui.url, "/halftune/upload/y.jsonl", "PUT", "x", origin="http://evil.example")[0] == 403


def test_web_ui_never_loads_torch(web_ui: Any) -> None:
    """Neither at its start nor for a page: no library of torch or CUDA is mapped into the process."""
    maps = Path(f"/proc/{web_ui.process.pid}/maps")
    if not maps.is_file():
        pytest.skip("only Linux shows what a process has mapped")
    assert ask(web_ui.url)[0] == 200
    mapped = maps.read_text()
    assert "pydantic_core" in mapped, "the file says what is loaded"
    assert not [name for name in ("libtorch", "libcuda", "libcudart") if name in mapped]
