"""Every stored column: name, dtype, unit, meaning. The store writes and reads by this file and nothing else.

A *key* column must be there; any other column may be missing (an older run) and then reads as null, as does a quantity
that was not measured. New columns are added nullable; a column is never renamed. Extra columns are kept as they are.
"""

from dataclasses import dataclass

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Column:
    """One stored column."""

    name: str  # Column name on disk, in tables, on axes
    dtype: str  # A DuckDB type name
    unit: str  # `nats`, `tokens`, `norm²` (squared norm of a log-probability gradient), … or empty
    meaning: str  # One line
    key: bool = False  # True when a file without this column is unreadable


STEP = Column("step", "BIGINT", "", "Optimiser step, from 0; measured before that step's update.", key=True)
GROUP = Column("group", "BIGINT", "", "Index of the prompt within the step.", key=True)
ROLLOUT = Column("rollout", "BIGINT", "", "Index of the rollout within the step.", key=True)

TOKENS = (
    STEP,
    GROUP,
    ROLLOUT,
    Column("turn", "BIGINT", "", "Index of the turn within the rollout.", key=True),
    Column("t", "BIGINT", "", "Index of the token within the completion, tool tokens included.", key=True),
    Column("token_id", "INTEGER", "", "Vocabulary index; beyond the vocabulary, a soft token."),
    Column(
        "token",
        "VARCHAR",
        "",
        "Decoded text of this one token; model output, never markup. `~` and the likeliest text for a soft one.",
    ),
    Column("logprob", "FLOAT", "nats", "log π(y_t) under the policy being updated; of a soft token, its log-density."),
    Column("behavior_logprob", "FLOAT", "nats", "log-probability reported by the sampler when it drew the token."),
    Column("entropy", "FLOAT", "nats", "Entropy of the distribution the token was drawn from."),
    Column("sum_pi_sq", "FLOAT", "", "Σ_v π_v²."),
    Column("energy_proxy", "FLOAT", "norm²", "‖e_y − π‖² = (1 − π_y)² + Σ_{v≠y} π_v²: score norm in logit space."),
    Column("energy_calibrated", "FLOAT", "norm²", "c·energy_proxy^b, fitted to this step's measured grad_norm_sq."),
    Column("hidden_norm_sq", "FLOAT", "", "‖h‖² of the final hidden state that predicts the token."),
    Column(
        "grad_norm_sq",
        "FLOAT",
        "norm²",
        "Squared length of the token's gradient, ‖∇ log π(y_t)‖²; its column measured_by says how it was found.",
    ),
    Column("grad_norm_sq_stderr", "FLOAT", "norm²", "Standard error of grad_norm_sq where it is an estimate."),
    Column("path_norm_sq", "FLOAT", "norm²", "‖Σ_{j≤t} ∇_θ log π(y_j)‖²."),
    Column("measured_by", "VARCHAR", "", "How grad_norm_sq was measured: none, exact, sketch, calibrated."),
    Column("inclusion_prob", "FLOAT", "", "Probability that this token was chosen for measurement, chosen or not."),
    Column("reward", "FLOAT", "", "Reward paid at this token."),
    Column("value", "FLOAT", "", "V(h_t) before y_t, from the critic before this step's update."),
    Column("baseline", "FLOAT", "", "B_t of the estimator that trains."),
    Column("advantage", "FLOAT", "", "A_t of the estimator that trains."),
    Column("mask", "BOOLEAN", "", "True where the policy sampled the token, false for tool output."),
    Column("attribution", "FLOAT", "norm²", "Signed share of ‖ḡ‖² held by this token: (A/N)·s·ḡ; they sum to it."),
    Column("signal", "FLOAT", "norm²", "Part of attribution along the other prompts' gradients: did it help them?"),
    Column("noise", "FLOAT", "norm²", "Part of attribution along its own prompt's gradient only."),
    Column(
        "contrast", "FLOAT", "", "softmax(2z₊ − z₋)[y] of copies fitted on right and wrong rollouts; low: critical."
    ),
)

ROLLOUTS = (
    STEP,
    GROUP,
    ROLLOUT,
    Column("prompt_id", "VARCHAR", "", "Name of the prompt, stable across steps and runs of one task."),
    Column("prompt", "VARCHAR", "", "Prompt text."),
    Column("answer", "VARCHAR", "", "Reference answer of the prompt, where its task or its record has one."),
    Column("completion", "VARCHAR", "", "Completion text, all turns."),
    Column("reward", "DOUBLE", "", "Total reward."),
    Column("length", "INTEGER", "tokens", "Policy tokens, the end token included."),
    Column("turns", "INTEGER", "", "Policy turns."),
    Column(
        "finish_reason",
        "VARCHAR",
        "",
        "stop (end token), length (budget), turns (turn limit) or unknown.",
    ),
    Column("score_norm_sq", "DOUBLE", "norm²", "‖Σ_t ∇_θ log π(y_t)‖², exact, where measured."),
    Column("energy_total", "DOUBLE", "norm²", "W_T = Σ_t ‖∇_θ log π(y_t)‖², estimated by the level sampled."),
    Column("energy_total_stderr", "DOUBLE", "norm²", "Its standard error; null where none left to chance was drawn."),
)
"""Reward parts follow as further columns `reward_<part>`."""

STEPS = (
    STEP,
    Column("loss", "DOUBLE", "", "−Σ c_{i,t} log π(y_{i,t}) of the step's first update: its gradient is −ḡ."),
    Column("reward_mean", "DOUBLE", "", "Mean total reward of the step's rollouts."),
    Column("reward_std", "DOUBLE", "", "Standard deviation of the same (ddof 0)."),
    Column("grad_norm", "DOUBLE", "norm", "‖ḡ‖ of the step's first update, before clipping."),
    Column("clipped", "BOOLEAN", "", "True when ‖ḡ‖ exceeded the clipping threshold."),
    Column("grad_norm_max", "DOUBLE", "norm", "Largest ‖ḡ‖ before clipping among the step's updates."),
    Column("n_updates", "BIGINT", "", "Optimizer steps taken on the step's rollouts."),
    Column("learning_rate", "DOUBLE", "", "Learning rate of the step's last update."),
    Column("ratio_mean", "DOUBLE", "", "Mean importance ratio over policy tokens and updates; null on-policy."),
    Column("ratio_clip_share", "DOUBLE", "", "Share of tokens whose gradient a clip, truncation or mask changed."),
    Column("kl_reference", "DOUBLE", "nats", "Mean estimate of the divergence from the starting policy."),
    Column("entropy_mean", "DOUBLE", "nats", "Mean entropy over policy tokens."),
    Column("logprob_mean", "DOUBLE", "nats", "Mean log-probability over policy tokens."),
    Column("mismatch_mean", "DOUBLE", "nats", "Mean of logprob − behavior_logprob over policy tokens."),
    Column("mismatch_max", "DOUBLE", "nats", "Largest |logprob − behavior_logprob|."),
    Column("mismatch_rms", "DOUBLE", "nats", "Root mean square of the same: differences of either sign count."),
    Column("mismatch_k3", "DOUBLE", "nats", "Mean of r − 1 − log r, r = π/μ: estimates KL(sampler μ ‖ trainer π)."),
    Column("mismatch_ratio_share", "DOUBLE", "", "Share of policy tokens with r > 2 or r < ½, before truncation."),
    Column("advantage_max", "DOUBLE", "", "Largest |advantage| of a policy token."),
    Column("length_mean", "DOUBLE", "tokens", "Mean completion length (policy tokens)."),
    Column("characters_mean", "DOUBLE", "characters", "Mean length of the texts that the policy wrote."),
    Column("length_max", "BIGINT", "tokens", "Longest completion."),
    Column("prompt_length_max", "BIGINT", "tokens", "Longest prompt."),
    Column("n_prompts", "BIGINT", "", "Groups in the step."),
    Column("n_rollouts", "BIGINT", "", "Rollouts in the step."),
    Column("n_tokens", "BIGINT", "tokens", "Policy tokens in the step."),
    Column("filter_rounds", "BIGINT", "", "Draws until the filter of sampling had filled the batch; null without one."),
    Column("filter_kept_share", "DOUBLE", "", "Share of the drawn rollouts that are in the batch; null without one."),
    Column("filter_reward_mean", "DOUBLE", "", "Mean total reward of all that were drawn; null without a filter."),
    Column("n_zero_variance_groups", "BIGINT", "", "Groups of two or more whose rewards are all equal."),
    Column("n_singleton_groups", "BIGINT", "", "Groups of one rollout."),
    Column("n_empty_completions", "BIGINT", "", "Completions with no text before the end token."),
    Column("n_truncated", "BIGINT", "", "Completions cut by the length budget."),
    Column("fallback_share", "DOUBLE", "", "Share of policy tokens where the estimator that trains used its fallback."),
    Column("energy_proxy_mean", "DOUBLE", "norm²", "Mean proxy energy over policy tokens."),
    Column("energy_tail_k", "DOUBLE", "", "Pareto-k of the upper tail of all policy tokens' proxy energies."),
    Column("energy_max_share", "DOUBLE", "", "Share of the total proxy energy held by the top 1 % of policy tokens."),
    Column("exact_tail_k", "DOUBLE", "", "Pareto-k of exact grad_norm_sq, never of sketched; null where none was."),
    Column("energy_total", "DOUBLE", "norm²", "Horvitz–Thompson estimate of Σ grad_norm_sq over all policy tokens."),
    Column("energy_total_stderr", "DOUBLE", "norm²", "Its standard error."),
    Column("n_sampled_tokens", "BIGINT", "tokens", "Tokens with an exact norm where the level sampled ran."),
    Column("calibration_slope", "DOUBLE", "", "b of the calibration energy_calibrated = c·energy_proxy^b."),
    Column("calibration_error", "DOUBLE", "", "Standard deviation of log grad_norm_sq around it."),
    Column("attribution_top_share", "DOUBLE", "", "Share of Σ|attribution| held by the top 1 % of policy tokens."),
    Column("signal_total", "DOUBLE", "norm²", "Σ signal: what different prompts' gradients have in common of ‖ḡ‖²."),
    Column("noise_total", "DOUBLE", "norm²", "Σ noise: each prompt's own part of ‖ḡ‖²."),
    Column("certificate_prob_z", "DOUBLE", "", "Is the sampler the policy? z of Σ(π_y − Σ_v π_v²), far from 0 if not."),
    Column("certificate_logprob_z", "DOUBLE", "", "The same question by z of Σ(log π_y + H)."),
    Column("critic_loss", "DOUBLE", "", "Mean squared error of the critic against its target, before its update."),
    Column("critic_explained_variance", "DOUBLE", "", "1 − Var(G_t − value)/Var(G_t); null if all G_t are equal."),
    Column("heldout_reward", "DOUBLE", "", "Mean reward on held-out prompts, where evaluated."),
    Column("heldout_reward_low", "DOUBLE", "", "Lower end of its 95 % interval over prompts; null below 16 prompts."),
    Column("heldout_reward_high", "DOUBLE", "", "Upper end of the same."),
    Column("heldout_samples", "BIGINT", "", "Answers n sampled to each held-out prompt."),
    Column("heldout_success", "DOUBLE", "", "avg@n: share of those answers whose total reward reached the threshold."),
    Column("heldout_success_low", "DOUBLE", "", "Lower end of its 95 % interval over prompts; null below 16 prompts."),
    Column("heldout_success_high", "DOUBLE", "", "Upper end of the same."),
    Column("heldout_pass_k", "BIGINT", "", "k of heldout_pass_at_k: the largest power of two up to n."),
    Column("heldout_pass_at_k", "DOUBLE", "", "Chance that one of k answers is a success, 1 − C(n−c, k)/C(n, k)."),
    Column("heldout_pass_at_k_low", "DOUBLE", "", "Lower end of its 95 % interval over prompts; null below 16."),
    Column("heldout_pass_at_k_high", "DOUBLE", "", "Upper end of the same."),
    Column("n_measured_prompts", "BIGINT", "", "Groups measured exactly in this step."),
    Column("n_sketched_prompts", "BIGINT", "", "Groups whose norms were estimated by sketching in this step."),
    Column("measurement_gaps", "BIGINT", "", "Measurements that failed in this step."),
    Column("tracker_gaps", "BIGINT", "", "Trackers that failed at this step; null without trackers."),
    Column("seconds_sample", "DOUBLE", "s", "Time spent generating."),
    Column("seconds_update", "DOUBLE", "s", "Time spent on forward, backward and the optimiser."),
    Column("seconds_forward", "DOUBLE", "s", "Time spent on the statistics of the level forward."),
    Column("seconds_estimate", "DOUBLE", "s", "Time spent on rewards, the token table, baselines and advantages."),
    Column("seconds_measure", "DOUBLE", "s", "Time spent on scheduled measurements."),
    Column("seconds_evaluate", "DOUBLE", "s", "Time spent on held-out prompts."),
    Column("seconds_store", "DOUBLE", "s", "Time spent writing the step before this one."),
    Column("not_finite", "VARCHAR", "", "The numbers of this row that were NaN or infinite, by name; null where none."),
)
"""Evaluations add `heldout_pass_at_<k>` for every power of two k up to the answers per prompt."""

ESTIMATOR = Column("estimator", "VARCHAR", "", "Name in ESTIMATORS.", key=True)
# none (it reads no energy), proxy, exact, sketch, calibrated or path
SOURCE = Column("energy_source", "VARCHAR", "", "Where its energies came from; none when it reads none.", key=True)

GRADIENTS = (
    STEP,
    ESTIMATOR,
    SOURCE,
    Column("n_prompts", "BIGINT", "", "Measured groups P."),
    Column("n_rollouts", "BIGINT", "", "Measured rollouts."),
    Column("total_power", "DOUBLE", "norm²", "mean_p ‖ḡ_p‖², ḡ_p the mean gradient of prompt p's group."),
    Column("mean_norm_sq", "DOUBLE", "norm²", "‖ḡ‖², ḡ = mean_p ḡ_p."),
    Column("variance", "DOUBLE", "norm²", "Batch variance Σ_p‖ḡ_p − ḡ‖²/(P(P−1)); null for one prompt."),
    Column("variance_low", "DOUBLE", "norm²", "Lower end of its 95 % interval over prompts; null below 16 prompts."),
    Column("variance_high", "DOUBLE", "norm²", "Upper end of the same."),
    Column("within", "DOUBLE", "norm²", "Part of P·variance from rollouts given the prompt; null without pools."),
    Column("between", "DOUBLE", "norm²", "Part of P·variance from prompts; null without pools."),
    Column("relative_bias", "DOUBLE", "", "‖m − ∇J‖/‖∇J‖ against the reference on other prompts."),
    Column("projection", "DOUBLE", "", "c = ⟨m, ∇J⟩/‖∇J‖² against the reference on other prompts."),
    Column("sf", "DOUBLE", "norm²", "variance/c²: variance at equal progress."),
    Column("efficiency", "DOUBLE", "", "⟨m,∇J⟩²/(‖∇J‖²(‖m‖² + variance)): share of this update that points along ∇J."),
    Column("reference", "VARCHAR", "", "Unbiased estimator that stands for ∇J, with all others where c_known says so."),
    Column("c_known", "BOOLEAN", "", "True where c is proved, so that bias, projection and SF are not estimated."),
    Column("sketch_dim", "BIGINT", "", "Buckets of the count sketches it was estimated from; null where it is exact."),
)

GRAMS = (
    STEP,
    ESTIMATOR,
    SOURCE,
    Column("group", "BIGINT", "", "Prompt p of the row's group gradient.", key=True),
    Column("other_estimator", "VARCHAR", "", "Estimator m' of the column's group gradient.", key=True),
    Column("other_energy_source", "VARCHAR", "", "Its energy source.", key=True),
    Column("other_group", "BIGINT", "", "Its prompt p'.", key=True),
    Column("inner_product", "DOUBLE", "norm²", "⟨ḡ_{m,p}, ḡ_{m',p'}⟩; each pair is stored once."),
    Column("n_rollouts", "BIGINT", "", "Measured rollouts of the step, all groups together.", key=True),
    GRADIENTS[-1],
)

SUBGROUPS = (
    STEP,
    Column("size", "BIGINT", "rollouts", "Rollouts of each smaller group that a group is cut into.", key=True),
    *GRAMS[1:-3],
    Column(
        "inner_product", "DOUBLE", "norm²",
        "Between prompts that of the mean over their smaller groups; within one, the mean over those of ⟨ḡ_m, ḡ_m'⟩.",
    ),
    *GRAMS[-2:],
)  # fmt: skip

SAMPLING = (
    STEP,
    Column("test", "VARCHAR", "", "Family of the sampling check: temperature, probability, top_p, …", key=True),
    Column("parameter", "DOUBLE", "", "Its setting, such as a temperature; null where the test has none."),
    Column("position", "BIGINT", "", "First token position of the row's bin: 0, 1, 2, 4, 8, …; null for all."),
    Column("n_tokens", "BIGINT", "tokens", "Policy tokens that were looked at."),
    Column(
        "score",
        "DOUBLE",
        "",
        "Σ of the statistic minus its mean under the model; of tests ^3 and ^4, Σ of its central moment.",
    ),
    Column("variance", "DOUBLE", "", "Σ of its variance under the model: z = score/√variance."),
    Column("observed", "DOUBLE", "", "Σ of the statistic itself where it counts tokens."),
    Column("gain", "DOUBLE", "nats", "Σ log p(y)/π(y) of the sampler with this setting."),
    Column("residual_sq", "DOUBLE", "nats²", "Σ(recorded log-probability − log p(y))²; null where none was recorded."),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "tokens": TOKENS,
    "rollouts": ROLLOUTS,
    "steps": STEPS,
    "gradients": GRADIENTS,
    "grams": GRAMS,
    "subgroups": SUBGROUPS,
    "sampling": SAMPLING,
}
"""Table name = folder name = view name."""


def column(table: str, name: str) -> Column:
    """Return the description of one stored column.

    Raises:
        KeyError: The table or the column is not part of the schema.
    """
    return {c.name: c for c in TABLES[table]}[name]
