"""Number formats: decided once (resolve), reported (report), kept at run time (guard)."""
