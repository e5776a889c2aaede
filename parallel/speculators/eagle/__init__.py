"""Draft layers (EAGLE-1 to 3.1, MTP, P-EAGLE): record, layouts, layers, runners, training."""
