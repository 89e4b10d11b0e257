"""The web UI of halftune. It imports the configuration only and starts runs as processes of their own."""
