"""Draft models that learn from the target while they serve."""
