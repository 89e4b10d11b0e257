"""What every room stands on: errors, tables of names, optional packages, logging, paths. No torch here."""
