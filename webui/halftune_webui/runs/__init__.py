"""Runs as the board sees them, from the disk alone; nothing here knows of Gradio."""
