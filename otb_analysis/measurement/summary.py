"""One step in scalars: the row of `steps`."""

import numpy as np

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.measurement.measurer import Measurement
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import pareto_k, top_share
from otb_analysis.types import Bool, Estimate, Float, LogitStats


def summarize(rollouts: Rollouts, table: TokenTable, estimate: Estimate, measurement: Measurement) -> dict[str, object]:
    """Return the scalars of a step's rollouts; the loop adds those of the update.

    Degenerate but legal input (groups of one, equal rewards, empty or cut completions) is counted here.
    """
    inside, stats, reward = table.mask, table.stats, table.total_reward
    drawn = table.drawn  # soft tokens have densities, and none of the statistics of a drawn one
    length = inside.sum(axis=1)
    mismatch = (stats.logprob - table.behavior_logprob)[inside]
    mismatch = mismatch[~np.isnan(mismatch)]  # rollouts from elsewhere may lack the sampler's log-probabilities
    energy, exact = stats.energy[drawn], measurement.tokens.whole_norm_sq[inside]
    return {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "entropy_mean": _mean(stats.entropy[drawn]),
        "logprob_mean": _mean(stats.logprob[drawn]),
        "mismatch_mean": _mean(mismatch),
        "mismatch_max": float(np.abs(mismatch).max(initial=0.0)) if mismatch.size or not inside.any() else None,
        "length_mean": length.mean(),
        "characters_mean": float(np.mean([sum(len(turn.text) for turn in turns) for turns in rollouts.turns])),
        "length_max": int(length.max()),
        "prompt_length_max": int(rollouts.prompt_length.max()),
        "n_prompts": len(rollouts.prompts),
        "n_rollouts": len(reward),
        "n_tokens": int(inside.sum()),
        "n_zero_variance_groups": int(zero_variance_groups(reward, table.group).sum()),
        "n_singleton_groups": int((np.bincount(table.group) == 1).sum()),
        "n_empty_completions": sum(not any(turn.text for turn in turns) for turns in rollouts.turns),
        "n_truncated": sum(reason == "length" for reason in rollouts.finish_reason),
        "fallback_share": _mean(estimate.fallback[inside].astype(float)),
        "energy_proxy_mean": _mean(energy),
        "energy_tail_k": pareto_k(energy),
        "energy_max_share": top_share(energy),
        "exact_tail_k": pareto_k(exact[np.isfinite(exact)]) if measurement.tokens.whole.any() else None,
        **level_scalars(measurement.tokens),
        **sampling_check(stats, drawn),
        "n_measured_prompts": len(np.unique(table.group[measurement.tokens.whole])),
        "n_sketched_prompts": measurement.tokens.n_sketched,
        "measurement_gaps": measurement.gaps,
    }


def level_scalars(measured: TokenMeasurements) -> dict[str, object]:
    """Return the step's scalars from the levels `sampled` and `attribution`; empty where neither ran."""
    scalars: dict[str, object] = {}
    if (drawn := measured.drawn) is not None:
        total = measured.energy_total
        scalars |= {
            "energy_total": None if total is None else float(total.estimate[0]),
            "energy_total_stderr": None if total is None or np.isnan(total.stderr[0]) else float(total.stderr[0]),
            "n_sampled_tokens": int((measured.measured_by == "exact").sum()),
            "calibration_slope": drawn.calibration.slope,
            "calibration_error": drawn.calibration.log_error,
        }
    if (share := measured.further.get("attribution")) is not None:
        scalars["attribution_top_share"] = top_share(np.abs(share[np.isfinite(share)]))
    parts = [name for name in ("signal", "noise") if name in measured.further]
    scalars |= {f"{name}_total": float(np.nansum(measured.further[name])) for name in parts}
    return scalars


def sampling_check(stats: LogitStats, mask: Bool) -> dict[str, float | None]:
    """Return the two z-scores of the sampling certificate, as columns of `steps`; None where nothing was random.

    z = Σ(π_y − Σ_v π_v²)/√Σ Var(π_y) and z = Σ(log π_y + H)/√Σ Var(log π_y) over policy tokens. Both numerators are
    martingales with these conditional variances if every token was drawn from the scored distribution, so a wrong
    temperature, a filter or another engine's probabilities show as |z| far above 2. Proved.
    """
    sums = {
        "certificate_prob_z": (np.exp(stats.logprob) - stats.sum_pi_sq, stats.pi_variance),
        "certificate_logprob_z": (stats.logprob + stats.entropy, stats.logprob_variance),
    }
    totals = {name: (x[mask].sum(), variance[mask].sum()) for name, (x, variance) in sums.items()}
    return {name: float(x / np.sqrt(variance)) if variance > 0 else None for name, (x, variance) in totals.items()}


def _mean(values: Float) -> float | None:
    return float(values.mean()) if values.size else None
