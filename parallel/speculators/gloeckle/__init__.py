"""Multi-token prediction by whole layers beside the target's last one (arXiv 2404.19737)."""
