"""What can be known of a model from its files without reading a weight."""
