"""One measured batch of rollouts, whoever sampled it: its table, forward statistics, and every level of measuring.

rollouts ─▶ forward ─▶ table [N, T] ─▶ measurer: exact norms ─▶ Gram matrix of every estimator
                                         │ sketched, drawn tokens, attribution
                                         ▼
                                 tokens: one record, which decides `measured_by`
"""
