"""Stands in for ``halftune chat RUN --json-lines`` in tests: it repeats the question, and knows nothing of models."""

import json
import queue
import sys
import threading


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if "broken" in sys.argv[-2]:
    print("I loading", file=sys.stderr)
    sys.exit("halftune chat: runs/x: the run has no result yet")
print("a library prints what it likes")
kinds = {"images": True, "audio": True, "videos": "films" in sys.argv[-2]}
say(event="ready", base="tiny", adapter=True, storage="fp32", compute="fp32", device="cpu", **kinds)
requests, stop = queue.Queue(), threading.Event()


def read() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        stop.set() if "stop" in request else requests.put(request)
    requests.put(None)


threading.Thread(target=read, daemon=True).start()
while (request := requests.get()) is not None:
    stop.clear()
    content, text = request["messages"][-1]["content"], ""
    if isinstance(content, list):
        *media, last = content
        kinds = [one["image_url"]["url"][:15] if "image_url" in one else one["type"] for one in media]
        content = f"{' '.join(kinds)} {last['text']}"
    words = content.split()
    if words == ["die"]:
        sys.exit("halftune chat: out of GPU memory")
    if words == ["wrong"]:
        say(event="error", id=request["id"], message="generation.top_p: too big", code="infer.bad_request")
        continue
    words = words if words != ["long"] else ["on"] * 10**6
    for word in ["tuned" if request["adapter"] else "base", *words]:
        if stop.is_set():
            break
        text += word + " "
        say(event="text", id=request["id"], text=word + " ")
        if len(words) > 1000:
            stop.wait(0.002)
    said = {"answer": text.strip(), "stopped": stop.is_set(), "tokens": len(text.split())}
    say(event="end", id=request["id"], seconds=0.1, **said)
