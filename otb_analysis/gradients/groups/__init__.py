"""The Gram matrix ⟨g_p, g_p'⟩ of whole groups' gradients; builds on `exact` and `batch`.

`group_gram` replaces a prompt's many rows of weights by the few that span them; `blocks` finds where the model can be
cut into blocks; `layered` takes the signals of every row through one block after the other, adds that block's products
to the matrix and forgets its gradients (the diagram is there); `vocabulary` forms the two largest matrices in slices.
A model without blocks has its gradients formed whole by `exact.reference`.
"""
