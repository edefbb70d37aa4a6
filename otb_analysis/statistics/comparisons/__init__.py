"""Comparisons between estimators.

`alike` finds estimators that are the same up to a factor. `conclusions` says which ones differ from a reference, with
control of false discoveries; its records are in `verdicts`.
"""
