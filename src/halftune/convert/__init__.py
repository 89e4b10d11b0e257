"""Translates configs of LLaMA-Factory, axolotl and TRL into a recipe; every key is accounted for.

In: the values of a foreign config.
Out: a recipe's text, and a report of what is equal, changed or refused.
Imported by: `cli`.
"""
