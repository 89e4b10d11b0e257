"""``python -m halftune``: the same as the ``halftune`` command, for torchrun and accelerate launch."""

from halftune.cli import main

if __name__ == "__main__":
    main()
