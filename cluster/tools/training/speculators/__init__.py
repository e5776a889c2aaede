"""Training of drafters that read the target: one file per family, and the interface that the loop knows them by."""
