"""Drafts of a target by its own layers, over its own KV rows."""
