"""Formulas behind the numbers of reports, as (name, formula) pairs."""

import numpy as np

from otb_analysis.diagnostics import certificate, changes, decline, shares


def _from(bounds: tuple[float, float]) -> str:
    return f"≥ {bounds[0]:.3g}" + (f", {bounds[1]:.3g}" if np.isfinite(bounds[1]) else "")


ALARM_FORMULAS = (
    ("reward_fall", f"(highest median₅ of the reward − median₃ − 3·spread) as a share of it {_from(decline.LOST)}"),
    ("vanished_gradient", f"share of the last 5 steps with ‖ḡ‖ = 0 {_from(decline.GONE)}"),
    ("not_finite", "number of an update's scalars that are NaN or infinite ≥ 1"),
    ("gradient_surge", f"exp(median₅ log‖ḡ‖ − median of the 20 to 100 steps before − 2·spread) {_from(changes.SURGE)}"),
    ("entropy_collapse", f"exp(highest running median − median₁₀ − 1.5·spread) of log entropy {_from(changes.FALL)}"),
    ("entropy_rise", f"exp(median₁₀ − lowest running median − 1.5·spread) of log entropy {_from(changes.RISE)}"),
    ("length_drift", f"exp(|median₁₀ − median of the first 20| − 1.5·spread) of log length {_from(changes.DRIFT)}"),
    ("zero_variance_groups", f"lower 99.9 % bound of their share over 20 steps {_from(shares.NO_SIGNAL)}"),
    ("ratio_tails", f"median₅ of max |log π/μ| {_from(shares.RATIO)}; mean₁₀ clipped {_from(shares.RATIO_CLIPPED)}"),
    ("tail_index", f"lower 99.9 % bound of the mean Pareto-k of exact norms over 10 records {_from(shares.HEAVY)}"),
    ("clip_fraction", f"rise of the share of 20 steps clipped over all steps before {_from(shares.RISE)}"),
    ("sampling_certificate", "a mixture martingale E of Σz with P(ever E ≥ 1/α) ≤ α = "
     f"{certificate.RISK[0]:g}, {certificate.RISK[1]:g}"),
)  # fmt: skip
"""Score of each detector, and from which on it is a watch, and an alarm."""


FIDELITY_FORMULAS = (
    ("proxy w_t", "‖e_y − π‖² = (1 − π_y)² + Σ_{v≠y} π_v², π the distribution that y_t was drawn from: the squared "
     "gradient of log π_y in the logits, free in the forward pass"),
    ("exact w_t", "‖s_t‖², s_t = ∇ log π(y_t) over the measured parameters; no 1/N, no advantage factor"),
    ("Pearson, pooled", "corr(x, y) over all tokens, x the proxy and y the exact energy"),
    ("Pearson, within", "corr(x − x̄_c, y − ȳ_c), x̄_c and ȳ_c the means of the token's cell c = (step, prompt, t), "
     "in cells of two or more tokens"),
    ("log-Pearson", "the same of log x and log y: a factor per cell on the proxy changes nothing within"),
    ("Spearman", "the same of the ranks, within: of the ranks inside the cell, of values rounded to 0.1 %"),
    ("gain lost", "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency of otb with these energies over all "
     "measured steps. 0: the proxy costs nothing. 1: the gain over rloo is gone"),
)  # fmt: skip
"""What the table of proxy and exact energies holds."""

ATTRIBUTION_FORMULAS = (
    ("share", "c·s·ḡ of a token, ḡ = Σ c·s, c its coefficient in the update, s = ∇log π; their sum is ‖ḡ‖²"),
    ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
)

AUDIT_FORMULAS = (
    ("efficiency", "⟨m,∇J⟩²/(‖∇J‖²·(‖m‖² + V/P)), m = E ĝ, V the variance of one prompt's group gradient, P prompts"),
    ("c", "⟨m,∇J⟩/‖∇J‖²"),
    ("bias", "‖m − ∇J‖/‖∇J‖"),
    ("SF", "variance/c²; of proved step lengths E‖g‖²/c² − ‖∇J‖²"),
    ("between", "2·V(N) − V(N/2) of no baseline; within = V − between"),
    ("larger groups", "E‖g_N‖² = q + a/N + b/(N(N−1)), b = 0 for none; variance at the same rollouts: N·V(N)/R"),
    ("best size of rloo", "1 + √(b/(q − ‖m‖²))"),
    ("dead groups", "mean over prompts of Σ_v C(k_v, n)/C(G, n), k_v of G rewards equal v; estimates pⁿ + (1−p)ⁿ"),
    ("share", "c·s·ḡ of a token, s = ∇log π, c its coefficient in the update ḡ = Σ c·s; divided by Σ‖ḡ‖² over steps"),
    ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
    ("gain lost", "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency"),
)  # fmt: skip
