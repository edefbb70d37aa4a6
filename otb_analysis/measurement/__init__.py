"""One measured batch of rollouts, whoever sampled it: its table, forward statistics, and every level of measuring.

rollouts ─▶ forward ─▶ table [N, T] ─▶ measurer ─▶ exact norms ─▶ Gram matrix of every estimator
                                          │        drawn tokens, sketched norms, attribution
                                          ▼
                                        tokens: one record of all levels, which alone decides `measured_by`
"""
