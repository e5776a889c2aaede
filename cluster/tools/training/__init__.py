"""Training of the bundled pair and of drafters by recipe: corpus, text, loop, report. Inference must not import it."""
