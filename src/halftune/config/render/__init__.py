"""The configuration and its schema written out."""
