"""From YAML and command line to plain values with their lines."""
