"""Used by all other packages: errors, registries, optional packages, logging, paths. Does not import torch."""
