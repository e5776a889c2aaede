"""Block drafters (DFlash, DSpark, DFlash 2, Domino): record, layouts, layers, runner, training."""
