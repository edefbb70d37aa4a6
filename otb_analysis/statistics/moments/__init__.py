"""Moments of group gradients and the measures of an estimator.

`measures` has the formulas of variance, bias, projection, SF (variance at equal progress) and efficiency. `gram`
estimates the moments from stored Gram matrices. `gradients` and `paired` add intervals; `gradients` also says how many
prompts an update needs. `pools` and `subgroups` make Gram matrices of other group sizes, `group_sizes` extrapolates to
larger ones, and `sketched` has the error of those from sketches. `totals` estimates a sum over all tokens from a sample
of them.
"""
