"""A program that runs its input, as ``sandboxed`` does where nothing can be isolated."""

import sys

exec(sys.stdin.read())
