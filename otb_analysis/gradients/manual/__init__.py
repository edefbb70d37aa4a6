"""The fast engine: forward and backward pass written by hand for Llama, Mistral, Qwen2 and Qwen3; builds on `exact`.

`support_check` says which models are supported, `llama_layout` reads a model into tensors, `activations` runs it
forward, `backward` holds the formulas of one block, `sinks` turns signals into outer products and coordinates, and
`manual_backward` puts them together for one rollout. Coordinates and norms are those of `exact`; what is gained is a
pass without an autograd graph, in memory that is used again.
"""
