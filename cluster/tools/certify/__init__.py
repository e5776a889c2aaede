"""The checks of a certificate that speculation leaves the output unchanged; each file is one kind of evidence.

    identity     the engine's tokens against plain decoding's, on the user's prompts
    draws        seeded verifications at the model's own vocabulary, counted
    scoring      movement of logits with the shape of a pass, and the choices that are closer than that
    goodness     comparison of counts with a distribution, and the smallest bias that would have been found
    checks       figures and findings of identity, scoring and draws
    certificate  the record of a check, and the certificate as JSON and Markdown

What no configuration changes, the exactness of each rule and of a cascade's levels, is enumerated by the tests
(`tests/actors/verification`).
"""
