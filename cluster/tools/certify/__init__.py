"""The checks of a certificate that speculation leaves the output unchanged; each file is one kind of evidence.

    identity     the engine's tokens against plain decoding's, on the user's prompts
    exact        the rule in use, enumerated on tiny vocabularies, beside broken variants that must be found
    levels       a cascade like the user's, enumerated and counted over several rounds, beside known mistakes
    draws        seeded verifications at the model's own vocabulary, counted
    scoring      movement of logits with the shape of a pass, and the choices that are closer than that
    goodness     comparison of counts with a distribution, and the smallest bias that would have been found
    checks       figures and findings of identity, scoring and draws
    certificate  the record of a check, and the certificate as JSON and Markdown

`rule_enumeration` and `cascade_enumeration` enumerate the production rules and levels over toy models.
"""
