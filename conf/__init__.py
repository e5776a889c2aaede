"""The command line's defaults: `config.yaml` picks a choice of every group. The choices are records: `cluster/config/schema.py`."""
