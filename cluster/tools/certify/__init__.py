"""What a certificate is made of: each file here is one kind of evidence that speculation left the output as it was.

    identity    the engine's tokens against plain decoding's, on the user's prompts
    exact       the rule in use, enumerated on tiny vocabularies, beside broken ones that must be found out
    levels      a cascade like the user's, enumerated, beside the known mistakes of drafting in levels
    rounds      several rounds of a cascade with the engine's coins, counted over toy models
    draws       seeded verifications at the model's own vocabulary, counted
    goodness    how counts are compared with a law, and the smallest bias that would have been seen
    rounding    how far logits move with the shape of a pass, and how many choices are closer than that
    summary     the certificate as a page

A *check* is a record with `name`, `passed` and its figures; the certificate passes if every check does.
"""
