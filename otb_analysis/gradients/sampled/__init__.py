"""Exact norms of a random part of the tokens, each with a known probability of being drawn; above `exact`, `manual`.

`sampled` draws the tokens in proportion to a size measure. The engines `fast` and `generic` send the signals of a
rollout's drawn tokens back through its own pass; of short rollouts under `generic`, `scattered` takes copies instead:

    rollout          P P P a b c d        drawn: b, d
    copies of it     P P P a b            one sampled token per row, so that every signal in the row is that token's
                     P P P a b c d
"""
