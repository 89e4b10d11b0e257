"""Renders the configuration and its schema."""
