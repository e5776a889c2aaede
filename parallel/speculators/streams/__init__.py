"""Streams beside the target's rows (Speculative Streaming, masks with gated LoRA, S3D): layers, runner, training."""
