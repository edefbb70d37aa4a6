"""From a policy and prompts to finished rollouts.

`models` makes or loads the policy, `generation` continues texts, and `sampling` plays the turns of a task. `decoding`
and `prefix_cache` are faster ways to sample and to score; both give what the model's own passes give, up to rounding.
"""
