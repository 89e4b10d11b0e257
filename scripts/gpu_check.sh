#!/usr/bin/env bash
# What a machine with a CUDA device can tell, in nine minutes and one command; a part that fails does not stop the
# others. Everything goes into one folder, and all of it but runs and caches into FOLDER.tar.gz; summary.txt says what
# passed, failed and was left out, and why. Leaves with 1 if a part failed or did not come to its end, or none passed.
#   bash scripts/gpu_check.sh                       the python3 on PATH if its torch sees the device, else a new .venv
#   GPU_CHECK_OUT=FOLDER bash scripts/gpu_check.sh  the folder (default: gpu_check)
#   GPU_CHECK_SECONDS=N bash scripts/gpu_check.sh   the time for all of it (default: 540)
#   GPU_CHECK_ONLY=REGEX bash scripts/gpu_check.sh  the parts whose names match, such as steps or '^train_|^check_'
#   GPU_CHECK_DRY=1 bash scripts/gpu_check.sh       without a device: what of it runs on a CPU, and what is left
# Parts, the most telling first: the operators' self-checks, LoRA at the width of a 7B model beside transformers and
# peft, operators' times beside published ones, attention routes, formats in training (fp16 overflow, exact resume),
# recipes of hybrids, FlashAttention-2 and a profile, other cuts of the operators, every operator, dtype and head size.
# Only by name, since it takes several calls: steps, the whole sizes of four models in every way of a step. It goes on
# where an earlier call with the same folder ended; FOLDER/steps.jsonl is all that it needs.
# Packages that are missing or too old are installed into FOLDER/site. A machine without a network needs them there or in
# another folder that PYTHONPATH names: scripts/gpu_wheels.txt names those that a usual image lacks.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${GPU_CHECK_OUT:-gpu_check}"
dry="${GPU_CHECK_DRY:-}"
limit="${GPU_CHECK_SECONDS:-540}"
only="${GPU_CHECK_ONLY:-}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
: >"$out/summary.txt"
say() { echo "$*" | tee -a "$out/summary.txt"; }

sees='import sys, torch; sys.exit(sys.version_info < (3, 11) or not torch.cuda.is_available())'
if [ -z "$dry" ] && ! python3 -c "$sees" 2>/dev/null; then
    source scripts/environment.sh dev || { say "failed  environment: neither this python nor .venv"; exit 1; }
    python3 -c "$sees" || { say "failed  no CUDA device for $(command -v python3)"; exit 1; }
fi
export PYTHONPATH="$PWD/src:$PWD/kernels:$PWD/webui${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false HALFTUNE_CACHE="$out/cache"

# Names of modules whose packages are there in the versions of pyproject.toml; others go into $out/packages.txt, with why.
present() {
    python3 - "$out/packages.txt" "$@" <<'END'
import importlib.util, re, sys, tomllib
from importlib import metadata

def numbers(text):
    return [int(one) for one in re.findall(r"\d+", text)[:3]]

named = {"yaml": "PyYAML", "xdist": "pytest-xdist", "fla": "flash-linear-attention", "flash_attn": "flash-attn"}
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [*project["dependencies"], *(one for some in project["optional-dependencies"].values() for one in some)]
lowest = {one[1].lower(): one[2] for line in wanted if (one := re.match(r"([\w-]+)>=([\d.]+)", line))}
with open(sys.argv[1], "w") as file:
    for module in sys.argv[2:]:
        name, least = named.get(module, module), lowest.get(named.get(module, module).lower(), "0")
        try:
            found = metadata.version(name) if importlib.util.find_spec(module) else ""
        except metadata.PackageNotFoundError:
            found = least  # a stand-in, or built in place
        if found and numbers(found) >= numbers(least):
            print(module)
        else:
            print(module, f"{name} {found or 'is missing'}" + (f", {least} is needed" if found else ""), file=file)
END
}
modules="torch triton pytest xdist pydantic yaml transformers peft accelerate safetensors datasets fla flash_attn
    flash_attn_interface"
if [ -z "$dry" ]; then
    export PYTHONPATH="$PYTHONPATH:$out/site"
    missing="$(present $modules >/dev/null; grep -cE '^(pydantic|yaml|transformers|peft|accelerate|safetensors|datasets) ' "$out/packages.txt")"
    if [ "$missing" != 0 ]; then
        python3 -m pip install -q --retries 0 --timeout 10 --no-deps --upgrade --target "$out/site" -c constraints.txt \
            -r scripts/gpu_wheels.txt >"$out/pip.log" 2>&1 || say "left    pip: $(tail -n 1 "$out/pip.log")"
    fi
fi
present=" $(present $modules | tr '\n' ' ')"
has() { [[ "$present" == *" $1 "* ]]; }
# part NAME SECONDS PACKAGES COMMAND...: runs it into NAME.log, unless a package is missing.
part() {
    local name="$1" seconds="$2" needs="$3" start=$SECONDS package rc
    shift 3
    [[ "$name" =~ $only ]] || return 0
    for package in $needs; do
        has "$package" || { say "left    $name: $(sed -n "s/^$package //p" "$out/packages.txt")"; return; }
    done
    [ -z "$dry" ] && [ "$seconds" -gt $((limit - SECONDS)) ] && seconds=$((limit - SECONDS))
    [ "$seconds" -gt 5 ] || { say "left    $name: no time"; return; }
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null
    rc=$?
    case $rc in
        0) say "passed  $name${dry:+, on the CPU} ($((SECONDS - start)) s)" ;;
        124 | 137) say "stopped $name after $seconds s: $(tail -n 1 "$out/$name.log")" ;;
        *) say "failed  $name ($rc, $((SECONDS - start)) s): $(tail -n 1 "$out/$name.log")" ;;
    esac
}
# tests NAME SECONDS PACKAGES FILE OPTIONS...: tests that need a device; without one they are only collected.
tests() {
    local name="$1" seconds="$2" needs="$3"
    shift 3
    if [ -n "$dry" ]; then
        say "left    $name: no CUDA device; $1 is only collected"
        collected+=("$1")
    else
        part "$name" "$seconds" "$needs" python3 -m pytest -q -rs -m gpu -p no:cacheprovider "$@"
    fi
}
# losses FOLDER: leaves with 1 unless a run's loss is lower at its end than at its begin; a few steps only have one.
losses='import json, sys
lines = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
found = [line["loss"] for line in lines if "loss" in line]
print("losses", found[0], "to", found[-1])
sys.exit(not found[-1] < (found[0] if len(found) > 4 else float("inf")))'
# trains NAME SECONDS CONFIG OVERRIDES...: a recipe by the command line, and whether it learns.
trains() {
    local name="$1" seconds="$2" config="$3"
    shift 3
    part "train_$name" "$seconds" "$all" bash -c '
        config="$1" folder="$2" losses="$3"
        shift 3
        python3 -m halftune train --config "$config" training.output_dir="$folder" "$@" || exit
        grep -hE "kernels: |is computed by torch" "$folder/train.log"
        exec python3 -c "$losses" "$folder"' trains "configs/$config" "$out/runs/$name" "$losses" "$@"
}

{
    python3 -c 'import sys, torch; print(sys.version); print("torch", torch.__version__)
if torch.cuda.is_available(): print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())'
    python3 -m pip list 2>/dev/null | grep -iE '^(torch|triton|transformers|peft|accelerate|fla|flash|pytest)'
    command -v nvidia-smi >/dev/null && nvidia-smi
} >"$out/machine.txt" 2>&1
say "$(sed -n '2,3p' "$out/machine.txt" | tr '\n' ' ')"
for package in fla flash_attn flash_attn_interface; do
    has "$package" || say "left    everything beside $package: it is not installed"
done
all="torch pydantic yaml transformers peft accelerate safetensors datasets"
collected=()
short="data.max_length=128 training.max_steps=3 training.logging_steps=1 logging.progress=false"
tiny="$short depends_on=[] model.name_or_path=builtin:qwen2-tiny logging.sample_prompts=[] data.eval=[]
    training.warmup_ratio=0"
twenty="${tiny/max_steps=3/max_steps=20}"
hybrids="qwen3_5 kimi_linear mamba2 rwkv7"

part plan 100 "$all" python3 -m halftune plan --config configs/quickstart.yaml
if [ -n "$dry" ]; then
    say "left    the operators' Triton kernels: no CUDA device; scripts/bench/compile_table.py compiles them without one"
    part check_gated_rms_norm 200 torch python3 -m halftune_kernels check --operators gated_rms_norm
    part lora 300 "$all" python3 scripts/bench/gpu_step.py --dry-run
    part times 200 torch python3 scripts/bench/operators.py --gpu --out "$out" --dry-run
    tests attention 120 "$all pytest" tests/attention/test_flash_on_gpu.py
    tests formats 200 "$all pytest" tests/end_to_end/test_gpu.py
    tests operators 200 "pytest triton" tests/kernels/test_kernels_on_gpu.py
    part collected 200 "$all pytest" python3 -m pytest -q --collect-only -m gpu -p no:cacheprovider "${collected[@]}"
    for model in $hybrids; do
        trains "$model" 200 "tiny/${model}_tiny.yaml" $short
    done
    trains quickstart 200 quickstart.yaml $tiny
    trains profile 200 quickstart.yaml $tiny --profile
    say "left    train_fa2, tune: no CUDA device"
else
    # One process for each operator: they compile for most of the time, each on its own core.
    for operator in gated_delta_rule kda rwkv7 ssd causal_conv1d gated_rms_norm rms_norm gated_activation \
        adapted_activation rope linear_cross_entropy float8_rows; do
        part "check_$operator" 120 "torch triton" python3 -m halftune_kernels check --operators "$operator" &
    done
    wait
    # Measured one after the other: nothing else may be on the device.
    part lora 200 "$all" python3 scripts/bench/gpu_step.py --models qwen2.5-7b --layers 8 --measured-only \
        --ways fused trainer plain compile plain-compile fp8 --out "$out/lora.jsonl"
    part times 100 torch python3 scripts/bench/operators.py --gpu --out "$out"
    tests attention 60 "$all pytest" tests/attention/test_flash_on_gpu.py &
    tests formats 120 "$all pytest" tests/end_to_end/test_gpu.py $(has xdist && echo "-n 4") &
    for model in $hybrids; do
        trains "$model" 100 "tiny/${model}_tiny.yaml" &
    done
    trains quickstart 120 quickstart.yaml &
    trains profile 100 quickstart.yaml $twenty precision=bf16 --profile &
    if python3 -m halftune plan --config configs/quickstart.yaml $twenty precision=bf16 attention=fa2 >"$out/fa2.txt" 2>&1
    then
        trains fa2 100 quickstart.yaml $twenty precision=bf16 attention=fa2 &
    else
        say "left    train_fa2: $(tail -n 1 "$out/fa2.txt")"
    fi
    wait
    # Cuts of the scans with two and three stages are those that it tries first.
    part tune 90 "torch triton" python3 scripts/tune_kernels.py --operators gated_delta_rule --sizes 128 --heads 16 32 \
        --kernels scan_forward scan_backward
    tests operators 200 "pytest triton" tests/kernels/test_kernels_on_gpu.py $(has xdist && echo "-n 14 --dist worksteal")
    if [ -n "$only" ]; then
        part steps "$limit" "$all" python3 scripts/bench/gpu_step.py --out "$out/steps.jsonl"
    else
        say "left    steps: only by GPU_CHECK_ONLY=steps, in several calls"
    fi
fi
count() { grep -c "^$1" "$out/summary.txt"; }
say "in all $(count passed) passed, $(count failed) failed, $(count stopped) stopped, $(count left) left out;" \
    "$SECONDS s; everything is in $out and $out.tar.gz"
tar -czf "$out.tar.gz" -C "$(dirname "$out")" --exclude="$(basename "$out")/"{runs,cache,site} \
    "$(basename "$out")"
grep -q '^passed' "$out/summary.txt" && ! grep -qE '^(failed|stopped)' "$out/summary.txt"
