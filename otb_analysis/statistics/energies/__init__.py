"""Token energies as data.

`fidelity` says how well one source of energies stands in for another, `weights` how energies go with rewards, `tail`
how few tokens hold them. `designs` draws the tokens to measure exactly when not all can be.
"""
