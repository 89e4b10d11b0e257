"""Reads YAML and command line into plain values with their places."""
