"""Certifies a model type without its weights: every promise of halftune, tried on a small copy of the real class.

In: a model type's config.json.
Out: a certificate: yes, no or refused for every promise.
Imported by: `cli`.
"""
