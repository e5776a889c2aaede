"""Chimera: layer, runner, training."""
