#!/usr/bin/env bash
# From nothing to a trained adapter: makes .venv, trains the builtin tiny model on the builtin facts, offline.
# Uses a GPU where there is one. A second call finds the finished runs; `rm -r runs` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh ""

export HF_HUB_OFFLINE=1
train --config configs/quickstart.yaml "$@"

python - <<'PY'
import json

for sample in json.load(open("runs/quickstart/samples.json"))["samples"]:
    before = " / ".join(sample["before"].splitlines())
    print(f"\n> {sample['prompt']}\n  before: {before}\n  after:  {sample['after']}")
PY
printf '\nbefore: '
python scripts/quickstart_score.py runs/quickstart --every 5 --base
printf 'after:  '
python scripts/quickstart_score.py runs/quickstart --every 5
cat <<'TEXT'

adapter  runs/quickstart/final/
plot     runs/quickstart/loss.png
report   runs/quickstart/report.html   (open it in a browser)

next     source .venv/bin/activate
         halftune chat runs/quickstart
         halftune plan --config configs/quickstart.yaml --hardware t4
TEXT
