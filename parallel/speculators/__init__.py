"""Drafters that read the hidden states of a target: records, checkpoints and passes. Knows no role and no round."""
