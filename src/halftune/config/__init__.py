"""The configuration: one YAML, checked whole, resolved once. No torch here."""
