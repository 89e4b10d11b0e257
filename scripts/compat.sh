#!/usr/bin/env bash
# Runs the fast tests with other versions of the packages that halftune stands on, beside those of .venv.
#   bash scripts/compat.sh                              the lowest versions that pyproject.toml declares, but torch's
#   bash scripts/compat.sh transformers==5.17.0         these, and of all else what .venv has
#   TESTS="tests/model tests/train" bash scripts/compat.sh …     a part of the tests
# torch is not replaced: its builds differ by machine. Name it to try it (the registry's build has 5 GB of CUDA packages):
#   bash scripts/compat.sh torch==2.11.0
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh dev

floors() {
    python - <<'PY'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
floors = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"])
floors.pop("torch")
print(*(f"{name}=={version}" for name, version in floors.items()))
PY
}
read -ra wanted <<<"${*:-$(floors)}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
echo "with ${wanted[*]}"
# What depends on torch comes without it; of all else pip chooses one set of versions that fit together.
install() { python -m pip install --quiet --disable-pip-version-check --only-binary :all: --target "$folder" "$@"; }
whole=() alone=()
for package in "${wanted[@]}"; do
    case "$package" in
        accelerate==* | peft==*) alone+=("$package") ;;
        *) whole+=("$package") ;;
    esac
done
[ ${#whole[@]} -eq 0 ] || install "${whole[@]}"
[ ${#alone[@]} -eq 0 ] || install --no-deps "${alone[@]}"
export HALFTUNE_CACHE="$folder/cache" PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -c 'import transformers, peft, accelerate; print("transformers", transformers.__version__, "peft", peft.__version__)'
# shellcheck disable=SC2086
python -m pytest -q -n "$(python -c 'import os; print(min(8, os.cpu_count() or 1))')" -m "not slow" ${TESTS:-tests}
