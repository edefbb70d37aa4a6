"""Exact norms of a random part of the tokens, each with a known probability of being drawn; builds on `exact`.

`sampled` draws the tokens in proportion to a size measure; `scattered` measures them, one copy of the rollout for each:

    rollout          P P P a b c d        drawn: b, d
    copies of it     P P P a b            one sampled token per row, so that every signal in the row is that token's
                     P P P a b c d
"""
