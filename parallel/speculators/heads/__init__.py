"""Heads on one hidden state (Medusa, blockwise, Hydra, ReDrafter, MLP, LSTM): cells, layouts, runner, training."""
