#!/usr/bin/env bash
# What a machine with a CUDA device can tell, in about ten minutes and one command; a part that fails does not stop the
# others. Everything goes into one folder; summary.txt says what passed, failed and was left out, and why.
#   bash scripts/gpu_check.sh                       the python on PATH if its torch sees the device, else a new .venv
#   GPU_CHECK_OUT=FOLDER bash scripts/gpu_check.sh  the folder (default: gpu_check)
#   GPU_CHECK_DRY=1 bash scripts/gpu_check.sh       the same commands without a device, as far as they go
# Parts, the most telling first: the operators' self-checks, their times beside published ones, the tests that need a
# device (attention routes and half formats, then every operator, dtype and head size), recipes, the quickstart.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${GPU_CHECK_OUT:-gpu_check}"
dry="${GPU_CHECK_DRY:-}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
: >"$out/summary.txt"
say() { echo "$*" | tee -a "$out/summary.txt"; }

sees='import sys, torch; sys.exit(sys.version_info < (3, 11) or not torch.cuda.is_available())'
if [ -z "$dry" ] && ! python -c "$sees" 2>/dev/null; then
    source scripts/environment.sh dev || { say "failed  environment: neither this python nor .venv"; exit 1; }
    python -c "$sees" || { say "failed  no CUDA device for $(command -v python)"; exit 1; }
fi
export PYTHONPATH="src:kernels:webui${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false HALFTUNE_CACHE="$out/cache"

present=" $(python -c 'import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if u.find_spec(p)))' \
    torch triton pytest xdist pydantic yaml transformers peft accelerate safetensors) "
has() { [[ "$present" == *" $1 "* ]]; }
# part NAME SECONDS PACKAGES COMMAND...: runs it into NAME.log, unless a package is missing.
part() {
    local name="$1" seconds="$2" needs="$3" start=$SECONDS package rc
    shift 3
    for package in $needs; do
        has "$package" || { say "left    $name: no $package here"; return; }
    done
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
    rc=$?
    case $rc in
        0) say "passed  $name ($((SECONDS - start)) s)" ;;
        124 | 137) say "stopped $name after $seconds s: $(tail -n 1 "$out/$name.log")" ;;
        *) say "failed  $name ($rc, $((SECONDS - start)) s): $(tail -n 1 "$out/$name.log")" ;;
    esac
}

{
    python -c 'import sys, torch; print(sys.version); print("torch", torch.__version__)
if torch.cuda.is_available(): print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())'
    python -m pip list 2>/dev/null | grep -iE '^(torch|triton|transformers|peft|accelerate|fla|flash|pytest)'
    command -v nvidia-smi >/dev/null && nvidia-smi
} >"$out/machine.txt" 2>&1
say "$(sed -n '2,3p' "$out/machine.txt" | tr '\n' ' ')"
all="pydantic yaml transformers peft accelerate safetensors"

# One process for each operator: they compile for most of the time, each on its own core.
operators="gated_delta_rule kda rwkv7 ssd causal_conv1d gated_rms_norm"
for operator in ${dry:+gated_rms_norm} $([ -n "$dry" ] || echo "$operators"); do
    part "check_$operator" 150 torch python -m halftune_kernels check --operators "$operator" &
done
wait
part times 120 torch python scripts/bench/kernels_gpu.py --out "$out" ${dry:+--dry-run}
part plan 40 "$all" python -m halftune plan --config configs/quickstart.yaml
tests="python -m pytest -q -m gpu -p no:cacheprovider"
part attention 170 "$all pytest" $tests tests/end_to_end/test_gpu.py &
part operators 170 pytest $tests tests/kernels/test_kernels_on_gpu.py $(has xdist && echo "-n 6") &
wait
for model in qwen3_5 kimi_linear mamba2 rwkv7; do
    part "train_$model" 60 "$all" python -m halftune train --config "configs/${model}_tiny.yaml" \
        training.output_dir="$out/runs/$model" ${dry:+training.max_steps=1} &
done
wait
part quickstart 60 "$all" python -m halftune train --config configs/quickstart.yaml \
    training.output_dir="$out/runs/quickstart" ${dry:+training.max_steps=1}
say "in all $SECONDS s; everything is in $out"
! grep -q '^failed' "$out/summary.txt"
