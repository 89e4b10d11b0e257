"""Runs as the web UI sees them, from the disk alone; nothing here knows of Gradio.

In: run folders; what a page asks for.
Out: states of runs; processes of their own.
Imported by: `app`, `context`, `hints`, `tabs`.
"""
