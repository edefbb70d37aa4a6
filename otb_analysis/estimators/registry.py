"""Every estimator by name: the name in this dict is the name on disk, on axes and on the command line."""

from otb_analysis.errors import InputError
from otb_analysis.estimators import across, means, prefixes, provided, published, regression, sequence, token, turns
from otb_analysis.estimators.portfolio import combined, is_portfolio, portfolio
from otb_analysis.estimators.spec import (
    DecayOptions,
    EstimatorSpec,
    QuantileOptions,
    RegressionOptions,
    TailOptions,
    ValueOptions,
)

IID = "rollouts i.i.d. from the scored policy: no top-p or top-k, no filter on outcomes, no first-N-finished"
IID_TAIL = f"{IID}; tail own_return or group"
SELF = "rollout i is part of its own baseline, which shrinks it by its share of the weight"
OTB = "The Optimal Token Baseline, arXiv 2602.07078"
ENERGY = ("energy",)
RATIO = ("ratio",)

# Each row: function, formula, unbiased, conditions, source, provenance; then what differs from the defaults.
# fmt: off
ESTIMATORS: dict[str, EstimatorSpec] = {
    "none": EstimatorSpec(means.none, "0", True, IID, "REINFORCE", "code", takes_single=True),
    "batch_mean": EstimatorSpec(
        means.batch_mean, "mean_j R_j over the batch", False,
        "(1 − 1/N)·∇J with N the rollouts of the whole batch: shorter, direction intact",
        "REINFORCE with a batch baseline", "code", batch_coupled=True, shrinks_by="batch", takes_single=True,
    ),
    "batch_mean_loo": EstimatorSpec(
        means.batch_mean_loo, "mean_{j≠i} R_j over the batch", True, IID, "batch_mean without i", "proved",
        batch_coupled=True, takes_single=True,
    ),
    "group_mean": EstimatorSpec(
        means.group_mean, "mean_j R_j", False, "(1 − 1/N)·∇J: shorter, direction intact", "Dr. GRPO", "code",
        shrinks_by="group",
    ),
    "grpo": EstimatorSpec(
        means.grpo, "mean_j R_j, then A/(std_j R_j + 1e-6), ddof 1", False, "the scale depends on rollout i", "GRPO",
        "code", target="∇ 2·arcsin√p for binary rewards, p the success rate of the prompt",
    ),
    "rloo": EstimatorSpec(means.rloo, "mean_{j≠i} R_j", True, IID, "REINFORCE leave-one-out", "code"),
    "opo": EstimatorSpec(means.opo, "Σ_j L_j R_j / Σ_j L_j", False, SELF, "OPO", "code"),
    "opo_loo": EstimatorSpec(means.opo_loo, "Σ_{j≠i} L_j R_j / Σ_{j≠i} L_j", True, IID, "opo without i", "proved"),
    "james_stein": EstimatorSpec(
        across.james_stein, "(1 − λ)·mean_{j≠i} R_j + λ·m, m and λ = v²/(v² + s² + 1e-6) from the other prompts", True,
        f"{IID}; prompts independent", "James–Stein shrinkage, arXiv 2511.03710", "code", batch_coupled=True,
    ),
    "james_stein_corrected": EstimatorSpec(
        across.james_stein_corrected,
        "(1 − λ)·mean_{j≠i} R_j + λ·m, λ = v²/(v² + τ²), v² = σ²/(n − 1), τ² = max(s² − σ²/n, 0), of the other prompts",
        True, f"{IID}; prompts independent", "james_stein with the noise taken out of the spread", "proved",
        batch_coupled=True,
    ),
    "energy_across_loo": EstimatorSpec(
        across.energy_across_loo, "Σ_{q≠p} Σ_j W_{j,T} R_j / Σ_{q≠p} Σ_j W_{j,T} over the other prompts q", True,
        f"{IID}; prompts independent", "sequence_optimal of the other prompts", "proved", needs=ENERGY, uses=RATIO,
        batch_coupled=True, takes_single=True,
    ),
    "energy_regression": EstimatorSpec(
        regression.energy_regression,
        "φ_{i,t}·β_{−p}, β_{−p} the w_t-weighted ridge regression of R on φ over all tokens of the other prompts, "
        "φ = (1, m, f, m·f, h, m·h, x, m·x), m = mean_{j≠i} R_j, f = u/(1 + u), u = W_{i,t−1}, h = H_t/(1 + H_t), "
        "x = t/T_max", True,
        f"{IID}; prompts independent; T_max fixed before sampling, never a padded or realised length; state from "
        "earlier steps", "the weighted fit of R on what is known before y_t, from other prompts", "proved",
        needs=("energy", "entropy"), uses=("ratio", "state"), options=RegressionOptions, batch_coupled=True,
    ),
    "maxrl": EstimatorSpec(
        published.maxrl, "mean_j R_j, then A/mean_j R_j", False, "the scale depends on rollout i",
        "MaxRL, arXiv 2602.02710", "code",
        target="∇ −Σ_{k<N} (1 − p)^k/k for binary rewards, p the success rate of the prompt",
    ),
    "mc_grpo": EstimatorSpec(
        published.mc_grpo, "median_j R_j, then A·N/(N − 1) for odd N", False,
        "rollout i is part of its own baseline", "MC-GRPO, arXiv 2601.22582; not divided by a spread", "abstract",
    ),
    "qae": EstimatorSpec(
        published.qae, "Q_q(R_j over the group), the least R_j that a share q does not exceed", False,
        "rollout i is part of its own baseline", "QAE, arXiv 2509.22611; not divided by a spread", "abstract",
        options=QuantileOptions,
    ),
    "gpg": EstimatorSpec(
        published.gpg, "mean_j R_j, then A·N/#{R_j ≠ 0} over the batch", False, "the scale depends on rollout i",
        "GPG, as in verl", "code", batch_coupled=True,
    ),
    "reinforce_plus_plus_baseline": EstimatorSpec(
        published.reinforce_plus_plus_baseline, "mean_j R_j + μ, then A/√(σ² + 1e-8), μ and σ² over all tokens", False,
        "μ and the scale depend on rollout i", "REINFORCE++ (baseline form), arXiv 2501.03262, as in verl", "code",
        batch_coupled=True,
    ),
    "trloo": EstimatorSpec(
        turns.trloo, "mean_{j≠i} G_j of the turn, j with that turn", True, IID, "TRLOO of Dr. Kernel, arXiv 2602.05885",
        "code", needs=("turn",),
    ),
    "tempo": EstimatorSpec(
        prefixes.tempo, "mean_j R_j + V(h_t) − V(h_{t+1}), then A/(std_j R_j), ddof 0", False,
        "V(h_{t+1}) depends on y_t, V and the scale on rollout i", "TEMPO (P2T), arXiv 2509.18314", "guess",
        needs=("token_id",),
    ),
    "tempo_loo": EstimatorSpec(
        prefixes.tempo_loo, "mean_{j≠i} R_j, j sharing h_t, or else the longest prefix that any shares", True, IID,
        "the prefix value of tempo without i", "proved", needs=("token_id",),
    ),
    "classic_optimal": EstimatorSpec(
        sequence.classic_optimal, "Σ_j ‖S_j‖² R_j / Σ_j ‖S_j‖²", False, SELF,
        "the classic optimal scalar E[R‖S‖²]/E‖S‖²", "proved", needs=("rollout_norm_sq",),
    ),
    "classic_optimal_loo": EstimatorSpec(
        sequence.classic_optimal_loo, "Σ_{j≠i} ‖S_j‖² R_j / Σ_{j≠i} ‖S_j‖²", True, IID, "classic_optimal without i",
        "proved", needs=("rollout_norm_sq",),
    ),
    "opob": EstimatorSpec(
        sequence.opob, "Σ_j ρ_j² ‖S_j‖² R_j / Σ_j ρ_j² ‖S_j‖², ρ_j = Π_t ρ_{j,t}", False, SELF,
        "OPOB of VCPO, arXiv 2602.17616; learning rate × √(ESS/B)", "code", needs=("rollout_norm_sq", "ratio"),
    ),
    "sequence_optimal": EstimatorSpec(
        sequence.sequence_optimal, "Σ_j W_{j,T} R_j / Σ_j W_{j,T}", False, SELF, "classic_optimal with E‖S‖² = E W_T",
        "proved", needs=ENERGY, uses=RATIO,
    ),
    "sequence_optimal_loo": EstimatorSpec(
        sequence.sequence_optimal_loo, "Σ_{j≠i} W_{j,T} R_j / Σ_{j≠i} W_{j,T}", True, IID, "sequence_optimal without i",
        "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb": EstimatorSpec(
        token.otb, "Σ_j W_{j,t} G_{j,t} / Σ_j W_{j,t}, j alive at t", False, SELF, OTB, "code", needs=ENERGY,
        uses=RATIO, options=TailOptions, takes_gaps=False,
    ),
    "otb_loo": EstimatorSpec(
        token.otb_loo, "Σ_{j≠i} W_{j,t} G_{j,t} / Σ_{j≠i} W_{j,t}, j alive at t", True, IID_TAIL, "otb without i",
        "proved", needs=ENERGY, uses=RATIO, options=TailOptions, takes_gaps=False,
    ),
    "otb_carry": EstimatorSpec(
        token.otb_carry, "Σ_j W_{j,t} X_{j,t} / Σ_j W_{j,t}, all j; after the end X = R and W = W_T", False, SELF,
        "otb with finished rollouts carried along", "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb_carry_loo": EstimatorSpec(
        token.otb_carry_loo, "Σ_{j≠i} W_{j,t} X_{j,t} / Σ_{j≠i} W_{j,t}, all j ≠ i; after the end X = R and W = W_T",
        True, IID, "otb_carry without i", "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb_turn": EstimatorSpec(
        token.otb_turn, "otb with t counting policy tokens across turns", False, SELF, OTB, "code", needs=ENERGY,
        uses=RATIO, options=TailOptions,
    ),
    "otb_turn_loo": EstimatorSpec(
        token.otb_turn_loo, "otb_loo with t counting policy tokens across turns", True, IID_TAIL, "otb_turn without i",
        "proved", needs=ENERGY, uses=RATIO, options=TailOptions,
    ),
    "token_optimal": EstimatorSpec(
        token.token_optimal, "Σ_j w_{j,t} G_{j,t} / Σ_j w_{j,t}, j alive at t", False, SELF,
        "the variance-optimal B_t* when tokens share no parameters", "proved", needs=ENERGY, uses=RATIO,
        options=TailOptions,
    ),
    "token_optimal_loo": EstimatorSpec(
        token.token_optimal_loo, "Σ_{j≠i} w_{j,t} G_{j,t} / Σ_{j≠i} w_{j,t}, j alive at t", True, IID_TAIL,
        "token_optimal without i", "proved", needs=ENERGY, uses=RATIO, options=TailOptions,
    ),
    "energy_ema": EstimatorSpec(
        token.energy_ema, "otb with W_t = λ W_{t−1} + w_t", False, SELF,
        "between token_optimal (λ = 0) and otb (λ = 1)", "proved", needs=ENERGY, uses=RATIO, options=DecayOptions,
    ),
    "energy_ema_loo": EstimatorSpec(
        token.energy_ema_loo, "otb_loo with W_t = λ W_{t−1} + w_t", True, IID_TAIL, "energy_ema without i", "proved",
        needs=ENERGY, uses=RATIO, options=DecayOptions,
    ),
    "position_optimal": EstimatorSpec(
        provided.position_optimal, "B_t* = E[s_t · Σ_k s_k G_k] / E‖s_t‖²", True, f"{IID}; B* from other rollouts",
        "minimiser of the variance among position-dependent constants", "proved", needs=("position_baseline",),
        takes_single=True,
    ),
    "value": EstimatorSpec(
        provided.value, "V(h_t); with γ or λ below 1, G_t − Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V(h_{t+1}) − V(h_t)",
        True, f"{IID}; a critic that has not seen these rollouts; γ = λ = 1", "actor-critic, GAE", "code",
        needs=("value",), options=ValueOptions, takes_single=True,
    ),
    "tvm": EstimatorSpec(
        provided.tvm, "V(h_t), the critic fitted to the share of correct rollouts through h_t", True,
        f"{IID}; a critic that has not seen these rollouts", "TVM, arXiv 2407.12863", "abstract", needs=("value",),
        takes_single=True,
    ),
}
# fmt: on
# `otb_turn` is `otb` wherever there are no tool tokens
ESTIMATORS["blend_otb_regression"] = combined({"otb_turn": 0.5, "energy_regression": 0.5}, ESTIMATORS)


def registered(name: str) -> EstimatorSpec | None:
    """Return the EstimatorSpec of a stored name, of a portfolio too; None where the name is not known here."""
    if not is_portfolio(name):
        return ESTIMATORS.get(name)
    try:
        return portfolio(name, ESTIMATORS)
    except InputError:
        return None
