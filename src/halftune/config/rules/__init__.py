"""What no type can say: rules between keys, and about the files that keys name."""
