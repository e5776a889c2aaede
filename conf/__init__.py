"""The command line's choices as YAML: `config.yaml` picks the defaults, `<group>/<choice>.yaml` is one choice."""
