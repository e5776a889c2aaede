"""What training of any module that drafts needs: batches, losses, checkpoints. It knows no method and no training loop,
and no serving process loads it."""
