#!/usr/bin/env bash
# From nothing to a trained adapter: makes .venv, trains the embedded default model on the embedded data, offline.
# Takes a GPU where there is one. A second call finds the finished runs; `rm -r runs` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh ""

export HF_HUB_OFFLINE=1
train --config configs/quickstart.yaml "$@"

python - <<'PY'
import json

for sample in json.load(open("runs/quickstart/samples.json"))["samples"]:
    print(f"\n> {sample['prompt']}\n  before: {sample['before']!r}\n  after:  {sample['after']!r}")
PY
cat <<'TEXT'

adapter  runs/quickstart/final/
plot     runs/quickstart/loss.png
report   runs/quickstart/report.html   (open it in a browser)

next     source .venv/bin/activate
         halftune chat runs/quickstart
         halftune plan --config configs/quickstart.yaml --hardware t4
TEXT
