"""Intervals over independent clusters.

`intervals` has the delete-one-prompt jackknife, on the law of `studentized`, and Student's interval over runs;
`passing` has success rates with several answers per prompt. Too few clusters give a point and no interval.
"""
