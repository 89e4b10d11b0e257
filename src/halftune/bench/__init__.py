"""`halftune bench`: measures training speed on this machine, each run in a separate process."""
