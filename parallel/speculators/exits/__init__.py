"""A layer behind an early exit (Kangaroo, EESD): layer, runner, training."""
