"""Heads on one hidden state (Medusa, blockwise, Hydra, ReDrafter, MLP, LSTM): arithmetic, tensors, layouts, runner."""
