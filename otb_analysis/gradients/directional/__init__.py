"""Derivatives of every token's log-probability along one direction of the parameters; builds on `exact` and `batch`.

s_t·d for all tokens costs one forward-mode pass (`forward_mode`) or two forward passes (`directional`). With d = ḡ, the
batch gradient, w_t s_t·ḡ is the token's share of ‖ḡ‖² (`attribution`).
"""
