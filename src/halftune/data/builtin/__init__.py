"""Data sets that come with halftune or are made of what every machine has."""
