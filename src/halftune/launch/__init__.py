"""Starting a run on several devices and machines: the command, and templates for schedulers that start it."""
