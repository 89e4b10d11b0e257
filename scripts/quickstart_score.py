"""Asks a quickstart's result the test questions, whose wordings are in no training row, and counts exact answers.

python scripts/quickstart_score.py runs/quickstart             # every question
python scripts/quickstart_score.py runs/quickstart --every 5   # one in five
python scripts/quickstart_score.py runs/quickstart --base      # the model without the adapter
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from halftune.data.sources.builtin.number_formats import questions


def wrong_answers(run: str, asked: list[dict[str, str]], base: bool = False) -> list[tuple[str, str]]:
    """(question, answer) of every wrong answer of a run.

    Raises:
        RuntimeError: the chat failed; the message is its standard error.
    """
    lines = [
        json.dumps({"id": at, "adapter": not base, "messages": [{"role": "user", "content": row["prompt"]}]})
        for at, row in enumerate(asked)
    ]
    chat = subprocess.run(
        [sys.executable, "-m", "halftune", "chat", run, "--json-lines"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    events = [json.loads(line) for line in chat.stdout.splitlines()]
    answers = {event["id"]: event["answer"] for event in events if event["event"] == "end"}
    if len(answers) != len(asked):
        raise RuntimeError(chat.stderr or str(events[-1:]))
    return [(row["prompt"], answers[at]) for at, row in enumerate(asked) if answers[at].strip() != row["completion"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask one question in N")
    parser.add_argument("--base", action="store_true", help="without the adapter")
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    given = parser.parse_args()
    asked = questions(held_out=True)[:: given.every]
    wrong = wrong_answers(given.run, asked, given.base)
    if given.wrong:
        print("\n".join(f"{question} → {answer}" for question, answer in wrong))
    print(f"{len(asked) - len(wrong)} of {len(asked)} test questions answered exactly")


if __name__ == "__main__":
    main()
