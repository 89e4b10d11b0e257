# Makes .venv with halftune in it, once per state of pyproject.toml and constraints.txt, and puts it on PATH.
# Use: source scripts/environment.sh [EXTRA,EXTRA]      from the repository's root
# PYTHON names the interpreter (default: python3).

_extras="${1:-}"
_stamp=".venv/.halftune-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)-${_extras:-base}"
if [ ! -e "$_stamp" ]; then
    _python="${PYTHON:-python3}"
    if ! "$_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "halftune needs Python 3.11 or newer; $_python is $("$_python" --version 2>&1)" >&2
        exit 1
    fi
    [ -x .venv/bin/python ] || "$_python" -m venv .venv
    echo "installing halftune into .venv (a few minutes the first time)"
    # One resolve; torch's pinned line decides between the CPU and the CUDA build. What is imported compiles itself.
    if command -v uv >/dev/null; then
        uv pip install --quiet --python .venv/bin/python -c constraints.txt -e ".${_extras:+[$_extras]}"
    else
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
            -e ".${_extras:+[$_extras]}"
    fi
    touch "$_stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
