"""The fast engine: forward and backward pass written by hand for Llama, Mistral, Qwen2 and Qwen3; builds on `exact`.

`forward` says which models are supported, reads one into tensors and runs it, `backward` holds the formulas of one
block and turns signals into outer products and coordinates, and `fast` puts them together for one rollout.
Coordinates and norms are those of `exact`; what is gained is a pass without an autograd graph, in memory that is used
again.
"""
