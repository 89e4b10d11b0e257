"""halftune: fine-tunes language models from one YAML file and gets the number formats right."""

__version__ = "0.1.0"
