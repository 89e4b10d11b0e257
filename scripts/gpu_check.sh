#!/usr/bin/env bash
# On a machine with a CUDA device: the plan for it, every test that needs one (operators included), the operators' self-check
# and times, and the quickstart and the hybrids' recipes trained on it.
# Uses the python on PATH if it has halftune's needs already, else makes .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python -c 'import torch, transformers, peft, accelerate, pydantic, pytest' 2>/dev/null; then
    source scripts/environment.sh dev
fi
export PYTHONPATH="src:kernels:webui${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
python -m halftune plan --config configs/quickstart.yaml
python -m pytest -q -m gpu tests
python -m halftune doctor --kernels
python scripts/bench/kernels_gpu.py
for model in qwen3_5 kimi_linear mamba2 rwkv7; do
    python -m halftune train --config "configs/${model}_tiny.yaml" "$@"
done
python -m halftune train --config configs/quickstart.yaml "$@"
