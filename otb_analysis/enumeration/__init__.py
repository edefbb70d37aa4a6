"""Tiny softmax policies enumerated exactly: the ground truth that every estimator and statistic is held against."""

from otb_analysis.enumeration.derailment import Derailment
from otb_analysis.enumeration.groups import batch_means, group_gradients, group_moments
from otb_analysis.enumeration.moments import GroupMoments, sampled_moments, weighted_moments
from otb_analysis.enumeration.population import (
    gap_closed,
    population_baseline,
    population_moments,
    position_optimum,
    prefix_optimum,
    regret,
    values,
)
from otb_analysis.enumeration.trees import Tree, TreeSpec, random_tree

__all__ = [
    "Derailment",
    "GroupMoments",
    "Tree",
    "TreeSpec",
    "batch_means",
    "gap_closed",
    "group_gradients",
    "group_moments",
    "population_baseline",
    "population_moments",
    "position_optimum",
    "prefix_optimum",
    "random_tree",
    "regret",
    "sampled_moments",
    "values",
    "weighted_moments",
]
