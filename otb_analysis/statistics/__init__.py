"""Variance, bias and progress of gradient estimators, fidelity of energies, tails and intervals.

NumPy in, plain numbers out; a quantity that is undefined on the given data is None.
"""

from otb_analysis.statistics.comparisons.alike import Alike, alike
from otb_analysis.statistics.comparisons.conclusions import conclude
from otb_analysis.statistics.comparisons.discoveries import Discovery, discoveries
from otb_analysis.statistics.comparisons.regret import gain_lost, position_optimum, regret
from otb_analysis.statistics.comparisons.verdicts import Conclusion, Signal, Verdict
from otb_analysis.statistics.energies.cells import position_cells
from otb_analysis.statistics.energies.designs import inclusion_probabilities, systematic_sample
from otb_analysis.statistics.energies.fidelity import Association, Fidelity, fidelity, realized_fidelity
from otb_analysis.statistics.energies.tail import pareto_k, top_share
from otb_analysis.statistics.energies.weights import WeightStatistics, weight_statistics
from otb_analysis.statistics.inference.intervals import (
    MIN_CLUSTERS,
    Interval,
    cluster_bootstrap,
    cluster_jackknife,
    jackknife_interval,
    log_ratio_t,
)
from otb_analysis.statistics.inference.passing import Passing, pass_at_k, passing
from otb_analysis.statistics.inference.seeds import seed_mean
from otb_analysis.statistics.moments.gradients import (
    GradientStatistics,
    gradient_statistics,
    pooled_statistics,
)
from otb_analysis.statistics.moments.gram import REFERENCE, deleted_moments
from otb_analysis.statistics.moments.measures import (
    Moments,
    batch_variance,
    crossing,
    efficiency,
    projection,
    relative_bias,
    rollout_equivalents,
    sf,
)
from otb_analysis.statistics.moments.noise import gradient_noise_scale
from otb_analysis.statistics.moments.paired import NOTHING, PairedRatios, Update, paired_ratios, update_ratios
from otb_analysis.statistics.moments.pools import (
    Partition,
    PoolGram,
    group_gradients,
    held_out,
    partitions,
    pool_gram,
    pool_statistics,
    rollout_features,
)
from otb_analysis.statistics.moments.sketched import SketchNoise, gram_from_sketch, sketch_noise
from otb_analysis.statistics.moments.subgroups import cut_groups, mean_over_subgroups, smaller_sizes
from otb_analysis.statistics.moments.totals import Totals, difference_total, hajek_mean, horvitz_thompson
from otb_analysis.types import Gram, Label, Proved

__all__ = [
    "MIN_CLUSTERS",
    "NOTHING",
    "REFERENCE",
    "Alike",
    "Association",
    "Conclusion",
    "Discovery",
    "Fidelity",
    "GradientStatistics",
    "Gram",
    "Interval",
    "Label",
    "Moments",
    "PairedRatios",
    "Partition",
    "Passing",
    "PoolGram",
    "Proved",
    "Signal",
    "SketchNoise",
    "Totals",
    "Update",
    "Verdict",
    "WeightStatistics",
    "alike",
    "batch_variance",
    "cluster_bootstrap",
    "cluster_jackknife",
    "conclude",
    "crossing",
    "cut_groups",
    "deleted_moments",
    "difference_total",
    "discoveries",
    "efficiency",
    "fidelity",
    "gain_lost",
    "gradient_noise_scale",
    "gradient_statistics",
    "gram_from_sketch",
    "group_gradients",
    "hajek_mean",
    "held_out",
    "horvitz_thompson",
    "inclusion_probabilities",
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
    "projection",
    "realized_fidelity",
    "regret",
    "relative_bias",
    "rollout_equivalents",
    "rollout_features",
    "seed_mean",
    "sf",
    "sketch_noise",
    "smaller_sizes",
    "systematic_sample",
    "top_share",
    "update_ratios",
    "weight_statistics",
]
