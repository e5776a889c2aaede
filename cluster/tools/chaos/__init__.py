"""Killing and freezing an engine's processes on purpose, to see that nothing is lost."""
