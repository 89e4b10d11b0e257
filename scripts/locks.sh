#!/usr/bin/env bash
# Writes locks/: every package of halftune[all] with its hashes, for Linux on x86-64 with Python 3.11 or newer.
#   bash scripts/locks.sh         needs uv
# cuda13.txt is what the package index has (torch's default build). cpu.txt is the same with torch's CPU wheel for Python
# 3.11, 3.12 or 3.13 and without CUDA's libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
CPU_WHEELS="6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2
3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6" # torch-2.13.0+cpu-cp31{1,2,3}, manylinux_2_28_x86_64

uv pip compile pyproject.toml --quiet --extra all -c constraints.txt --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-header --output-file locks/cuda13.txt
awk -v hashes="$(tr '\n' ' ' <<<"$CPU_WHEELS")" '
    /^[a-z]/ {
        left_out = /^(nvidia|cuda|triton)/ && !/^nvidia-ml-py/
        if (/^torch==/) {
            sub(/==[^ ]*/, "&+cpu"); print; left_out = 1; n = split(hashes, each, " ")
            for (i = 1; i <= n; i++) print "    --hash=sha256:" each[i] (i < n ? " \\" : "")
        }
    }
    !left_out' locks/cuda13.txt >locks/cpu.txt
