"""One checked batch of rollouts, and the forward pass that every engine shares.

`inputs` checks what the caller passed and strips the padding; `scope` picks the parameters; `forward` is the one place
where logits are shifted against tokens, also with the model at other weights, and lets a pass read what rollouts have
in common once. This folder builds on no other folder of `gradients`.

    rollout     P P P a b        P: prompt, a b: sampled tokens
    logits        P P a          the logits at index t − 1 predict token t
    score             a b        s_a = ∇ log π(a | P P P),  s_b = ∇ log π(b | P P P a)
"""
