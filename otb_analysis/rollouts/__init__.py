"""From a policy and prompts to finished rollouts.

`models` makes or loads the policy, `generation` continues texts, and `sampling` plays the turns of a task. `decoding`
is a faster way to sample, which gives what the model's own passes give, up to rounding.
"""
