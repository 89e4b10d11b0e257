"""Number formats: decided once (resolve), reported (report), enforced at run time (guard)."""
