"""Comparisons between estimators.

`alike` finds estimators that are the same up to a factor. `decisions` says which ones are better than another one.
"""
