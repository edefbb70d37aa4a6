"""Tiny softmax policies enumerated exactly: the ground truth that every estimator and statistic is held against."""
