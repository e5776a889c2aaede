"""A fleet on the virtual clock: target replicas with coordinators of their own, draft pools, regions, load and losses.

`description.py` is what a file says of a fleet, `layouts.py` the ways to use its devices, `simulation.py` runs one of
them, `planning.py` runs all and ranks them by what a million tokens costs. `docs/fleet.md` has the model.
"""
