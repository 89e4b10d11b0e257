#!/usr/bin/env bash
# Makes .venv with the development tools and runs checks and tests. On two cores:
#   bash scripts/test.sh fast      three minutes: no browser, no training in processes of its own
#   bash scripts/test.sh           eleven minutes: what CI runs before a change lands
#   bash scripts/test.sh all       much longer: also what is marked nightly, of which each kind has one test in CI
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
    fast) marks="not slow and not nightly" ;;
    all) marks="slow or not slow" ;;
    "") marks="not nightly" ;;
    *) echo "sets of tests: fast, all, or none of both for what CI runs; not $1" >&2 && exit 2 ;;
esac
source scripts/environment.sh dev,docs

# The web UI's tests need a browser; where Debian's cannot be added (no root, no network), they skip and say so.
# Ubuntu's package of that name is only a pointer to a snap.
if [ "${1:-}" != fast ] && [ ! -x /usr/bin/chromium ]; then
    if [ "$(id -u)" = 0 ] && grep -qsx 'ID=debian' /etc/os-release; then
        echo "installing chromium for the web UI's tests"
        apt=(timeout 600 apt-get -yqq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
        { "${apt[@]}" update && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install --no-install-recommends chromium; } \
            >/dev/null 2>&1 || echo "chromium could not be installed"
    fi
    [ -x /usr/bin/chromium ] || echo "no /usr/bin/chromium: the browser tests will be skipped"
fi

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ruff check .
ruff format --check .
# The types are checked beside the tests: one thread works on them for a minute. What it found is told at the end.
types="$(mktemp)"
checking=""
trap '[ -z "$checking" ] || kill "$checking" 2>/dev/null || true; rm -f "$types"' EXIT
if [ "${1:-}" != fast ]; then
    pyright --pythonpath "$(command -v python)" >"$types" 2>&1 &
    checking=$!
fi
failed=0
pytest -q -n logical --maxprocesses 8 -m "$marks" --durations=25 --durations-min=20 || failed=$?
[ -z "$checking" ] || wait "$checking" || failed=$?
cat "$types"
exit "$failed"
