"""Variance, bias and progress of gradient estimators, fidelity of energies, tails and intervals.

NumPy in, plain numbers out; a quantity that is undefined on the given data is None.
"""

from otb_analysis.statistics.comparisons.alike import alike
from otb_analysis.statistics.comparisons.decisions import DIFFERENCE, Comparison, Decision, decide
from otb_analysis.statistics.energies.cells import position_cells
from otb_analysis.statistics.energies.designs import inclusion_probabilities, systematic_sample
from otb_analysis.statistics.energies.fidelity import (
    Association,
    Fidelity,
    fidelity,
    fidelity_by_part,
    realized_fidelity,
)
from otb_analysis.statistics.energies.tail import pareto_k, top_share
from otb_analysis.statistics.energies.weights import weight_statistics
from otb_analysis.statistics.inference.intervals import (
    MIN_CLUSTERS,
    Interval,
    cluster_jackknife,
    is_informative,
    jackknife_interval,
    log_ratio_t,
    seed_mean,
)
from otb_analysis.statistics.inference.passing import pass_at_k, passing
from otb_analysis.statistics.moments.gradients import (
    GradientStatistics,
    gradient_noise_scale,
    gradient_statistics,
    pooled_statistics,
)
from otb_analysis.statistics.moments.gram import REFERENCE, deleted_moments
from otb_analysis.statistics.moments.measures import Moments, efficiency
from otb_analysis.statistics.moments.paired import (
    NOTHING,
    PairedRatios,
    Update,
    gain_lost,
    paired_ratios,
    update_ratios,
)
from otb_analysis.statistics.moments.pools import (
    Partition,
    PoolGram,
    group_gradients,
    held_out,
    partitions,
    pool_gram,
    pool_statistics,
    position_optimum,
)
from otb_analysis.statistics.moments.portfolio import best_weights, fitted_weights, with_portfolio
from otb_analysis.statistics.moments.sketched import sketch_noise
from otb_analysis.statistics.moments.subgroups import cut_groups, mean_over_subgroups, smaller_sizes
from otb_analysis.statistics.moments.totals import Totals, difference_total, horvitz_thompson
from otb_analysis.types import Gram, Proved

__all__ = [
    "DIFFERENCE",
    "MIN_CLUSTERS",
    "NOTHING",
    "REFERENCE",
    "Association",
    "Comparison",
    "Decision",
    "Fidelity",
    "GradientStatistics",
    "Gram",
    "Interval",
    "Moments",
    "PairedRatios",
    "Partition",
    "PoolGram",
    "Proved",
    "Totals",
    "Update",
    "alike",
    "best_weights",
    "cluster_jackknife",
    "cut_groups",
    "decide",
    "deleted_moments",
    "difference_total",
    "efficiency",
    "fidelity",
    "fidelity_by_part",
    "fitted_weights",
    "gain_lost",
    "gradient_noise_scale",
    "gradient_statistics",
    "group_gradients",
    "held_out",
    "horvitz_thompson",
    "inclusion_probabilities",
    "is_informative",
    "jackknife_interval",
    "log_ratio_t",
    "mean_over_subgroups",
    "paired_ratios",
    "pareto_k",
    "partitions",
    "pass_at_k",
    "passing",
    "pool_gram",
    "pool_statistics",
    "pooled_statistics",
    "position_cells",
    "position_optimum",
    "realized_fidelity",
    "seed_mean",
    "sketch_noise",
    "smaller_sizes",
    "systematic_sample",
    "top_share",
    "update_ratios",
    "weight_statistics",
    "with_portfolio",
]
