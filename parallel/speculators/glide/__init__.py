"""GliDe: layer, runner, training."""
