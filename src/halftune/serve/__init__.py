"""Serve results by the OpenAI API: adapters by name beside their base model, on vLLM or on transformers.

In: run folders.
Out: answers over HTTP; vLLM's command line.
Imported by: `cli`.
"""
