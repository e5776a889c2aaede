"""Training of the bundled pocket pair: corpus, tokenizer, target, distilled drafter. Inference must not import it."""
