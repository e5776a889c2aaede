"""`config.yaml`: the choice of every group without overrides, and the help. Choices are records of the code."""
