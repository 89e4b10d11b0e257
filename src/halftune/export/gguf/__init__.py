"""Writes a Hugging Face folder as one GGUF file, and compares the file with the folder.

In: the folder of an exported model.
Out: a GGUF file that llama.cpp and Ollama read; a Modelfile.
Imported by: name, from a table.
"""
