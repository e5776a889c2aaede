"""The drafter that is the target itself with fewer layers: its record and its drafting."""
