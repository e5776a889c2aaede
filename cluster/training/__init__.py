"""Training of the bundled pocket pair: corpus, tokenizer, target, distilled drafter. Must not be imported at inference."""
