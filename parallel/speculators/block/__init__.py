"""Block drafters (DFlash, DSpark, DFlash 2, Domino): record and layouts of checkpoints, arithmetic, layers, runner."""
