"""Exact score norms, for any model whose layers have rules; builds on `batch`.

`reference` takes one ordinary backward pass per token and is what every other engine is compared with. `generic` forms
no weight gradient. A probe (`plan`) finds the *cut*, the input of the first layer behind the last attention: above it a
token signals at its own position only and its gradient is one outer product; below it signals of many tokens go back
together (`plan`, `attention`), and each layer's rule (`layers`) turns them into coordinates of the same length.
At its first use a model is compared with plain backward passes (`verdicts`).

    tokens ─▶ embedding ─▶ blocks ─▶ last attention ─▶ │ cut │ ─▶ feed-forward, norm, output layer ─▶ log π
              ◀── coordinates, many signals at once ── │     │ ◀── outer products, one pass ──────────
"""
