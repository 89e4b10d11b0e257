"""Rules between keys, and about files of the configuration."""
