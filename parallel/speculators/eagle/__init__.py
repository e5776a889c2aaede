"""Draft layers (EAGLE-1 to 3.1, MTP, P-EAGLE): record and layouts of checkpoints, arithmetic, layers, runners."""
