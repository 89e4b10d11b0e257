"""`halftune bench`: how fast a configuration trains on this machine, each run in a process of its own."""
