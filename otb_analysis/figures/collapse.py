"""Health over steps: what moves before, while and after a run collapses."""

from collections.abc import Mapping

import pandas as pd

from otb_analysis.figures.curves import Quantity

QUANTITIES = (
    Quantity("Reward", "mean of the step", "reward_mean"),
    Quantity("Gradient norm", "‖ḡ‖ before clipping", "grad_norm", from_zero=True),
    Quantity("Clipped steps", "share of the last 20", "clipped_share", share=True, smoothed=False),
    Quantity("Entropy", "nats, mean over tokens", "entropy_mean", from_zero=True),
    Quantity("Length", "tokens, mean", "length_mean", from_zero=True),
    Quantity("Equal-reward groups", "share of groups", "zero_variance_share", share=True),
    Quantity("Tail of token gradients", "Pareto-k of the proxy", "energy_tail_k"),
    Quantity("Tail of exact norms", "Pareto-k; from 1 on variance is infinite", "exact_tail_k", rare=True),
    Quantity("Top 1 % of tokens", "their share of all proxy energy", "energy_max_share", share=True),
    Quantity("Sampler mismatch", "nats, largest", "mismatch_max", from_zero=True),
    Quantity("Clipped tokens", "share, by the ratio", "ratio_clip_share", share=True),
    Quantity("Is the sampler the policy?", "z, near 0 if so", "certificate_prob_z"),
    Quantity("Cut completions", "share of rollouts", "truncated_share", share=True),
    Quantity("Empty completions", "share of rollouts", "empty_share", share=True),
    Quantity("Baseline fallback", "share of tokens", "fallback_share", share=True),
)
SHARES = {
    "zero_variance_share": ("n_zero_variance_groups", "n_prompts"),
    "truncated_share": ("n_truncated", "n_rollouts"),
    "empty_share": ("n_empty_completions", "n_rollouts"),
}
DEGENERATE = {
    "n_zero_variance_groups": "groups of equal reward",
    "n_singleton_groups": "groups of one",
    "n_empty_completions": "empty completions",
    "n_truncated": "cut completions",
    "measurement_gaps": "measurement gaps",
}
"""Legal input from which nothing can be learned or measured; counted, never an error."""
CLIP_WINDOW = 20


def derived(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps table with the shares that the panels need.

    zero_variance_share = n_zero_variance_groups / n_prompts, the others of `SHARES` alike; clipped_share = mean of
    `clipped` over the last 20 steps, from the fifth on.
    """
    table = steps.sort_values("step")
    known = {name: pair for name, pair in SHARES.items() if set(pair) <= set(table)}
    shares = {name: table[part].astype(float) / table[of].astype(float) for name, (part, of) in known.items()}
    if "clipped" in table:
        clipped = table["clipped"].astype("Float64").astype(float)
        shares["clipped_share"] = clipped.rolling(CLIP_WINDOW, min_periods=5).mean()
    return table.assign(**shares)


def degenerate_table(steps: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return how often each run met degenerate input, summed over its steps; a count never recorded is missing."""
    rows = [table.reindex(columns=list(DEGENERATE)).sum(min_count=1) for table in steps.values()]
    counts = pd.DataFrame(rows, columns=list(DEGENERATE)).astype("Float64").astype("Int64").rename(columns=DEGENERATE)
    norms = [table.reindex(columns=["grad_norm"]).dropna().to_numpy(float) for table in steps.values()]
    counts["steps with gradient 0"] = pd.array([(norm == 0).sum() if norm.size else None for norm in norms], "Int64")
    counts.insert(0, "run", list(steps))
    return counts.reset_index(drop=True)
