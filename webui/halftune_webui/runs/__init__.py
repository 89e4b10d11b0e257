"""Runs as the web UI sees them, from the disk alone; nothing here knows of Gradio."""
