"""Every estimator by name: the name in this dict is the name on disk, on axes and on the command line.

Portfolios combine them by fixed weights; the name of one is its formula, `0.5*otb+0.5*energy_regression`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import across, group, published, remembered
from otb_analysis.estimators.spec import (
    NOWHERE,
    BaselineResult,
    Batch,
    DecayOptions,
    DiscountOptions,
    EstimatorSpec,
    KalmanOptions,
    LengthOptions,
    NoOptions,
    QuantileOptions,
    RegressionOptions,
    TailOptions,
    ValueOptions,
)
from otb_analysis.objectives.registry import Provenance
from otb_analysis.types import Tallies

EXAMPLE = "0.5*otb+0.5*energy_regression"
SURE_FIRST: tuple[Provenance, ...] = ("code", "proved", "abstract", "guess")
TOLERANCE = 1e-9  # how far from 1 the sum of the weights may be


def is_portfolio(name: str) -> bool:
    """Return whether a name is that of a portfolio; no other estimator's has a star."""
    return "*" in name or name == "portfolio"


def portfolio(name: str, known: Mapping[str, EstimatorSpec]) -> EstimatorSpec:
    """Return the EstimatorSpec of A = Σ_k a_k A_k, a portfolio of known estimators written `weight*name+weight*name`.

    Weights are finite, sum to 1 and may be negative: `1.5*rloo+-0.5*none`. It is unbiased where every member is, needs
    what any needs, and takes what all take. Members run with their defaults; the portfolio's own options are those of
    `energy_regression`, where it is one.

    Raises:
        InputError: A term is not of that form, names no estimator or one twice, or the weights do not sum to 1.
    """
    weights: dict[str, float] = {}
    for term in name.split("+"):
        weight, _, member = (part.strip() for part in term.partition("*"))
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not member:
            raise InputError(f"portfolio {name!r} has the term {term!r}; write it as {EXAMPLE}.")
        if member not in known:
            raise InputError(f"portfolio {name!r} has the estimator {member!r}; {nearest(member, known)}")
        if member in weights:
            raise InputError(f"portfolio {name!r} has {member} twice; add its weights.")
        weights[member] = number
    if abs(sum(weights.values()) - 1) > TOLERANCE:
        raise InputError(f"portfolio {name!r} has weights that sum to {sum(weights.values()):g}; divide them by that.")
    return combined(weights, known)


def combined(weights: Mapping[str, float], known: Mapping[str, EstimatorSpec]) -> EstimatorSpec:
    """Return the EstimatorSpec of A = Σ_k a_k A_k, from those of its members."""
    members = {name: known[name] for name in weights}
    entries = members.values()
    biased = [f"{name} ({entry.conditions})" for name, entry in members.items() if not entry.unbiased]
    targets = {entry.target for entry in entries}
    needs = tuple(dict.fromkeys(need for entry in entries for need in entry.needs))

    def weighted_sum(batch: Batch, options: Any) -> BaselineResult:
        """Combine estimators by fixed weights that sum to 1.

        A = Σ_k a_k A_k, and so B = G − A = Σ_k a_k B_k where no member rescales.
        """
        whole, kinds = BaselineResult(np.zeros((1, 1)), NOWHERE), set[object]()
        for name, entry in members.items():
            result = entry.function(batch, options if type(options) is entry.options else entry.options())
            if (kept := result.state) is not None:
                kinds.add(kept.sums.shape[1] if isinstance(kept, Tallies) else kept.features)
            if len(kinds) > 1:  # one state is given back, and a member cannot read another one's
                raise InputError(f"portfolio of {' and '.join(members)} has memories of two kinds; keep one of them.")
            b = result.baseline
            if result.scale is not None:
                b = batch.returns - (batch.returns - b) * result.scale
            baseline, fallback = whole.baseline + weights[name] * b, whole.fallback | result.fallback
            whole = BaselineResult(baseline, fallback, state=result.state or whole.state)
        return whole

    return EstimatorSpec(
        weighted_sum, " + ".join(f"{weight:g}·B({name})" for name, weight in weights.items()), not biased,
        "as its members: " + "; ".join(biased or dict.fromkeys(entry.conditions for entry in entries)),
        f"portfolio of {' and '.join(members)}",
        SURE_FIRST[max(SURE_FIRST.index(entry.provenance) for entry in entries)],
        target=targets.pop() if len(targets) == 1 else "∇J", needs=needs,
        uses=tuple(dict.fromkeys(use for entry in entries for use in entry.uses if use not in needs)),
        options=RegressionOptions if any(e.options is RegressionOptions for e in entries) else NoOptions,
        batch_coupled=any(entry.batch_coupled for entry in entries),
        takes_gaps=all(entry.takes_gaps for entry in entries),
        takes_single=all(entry.takes_single for entry in entries),
        ordered=any(entry.ordered for entry in entries),
    )  # fmt: skip


IID = "rollouts i.i.d. from the scored policy: no top-p or top-k, no filter on outcomes, no first-N-finished"
IID_TAIL = f"{IID}; tail own_return or group"
SELF = "rollout i is part of its own baseline, which shrinks it by its share of the weight"
OTB = "The Optimal Token Baseline, arXiv 2602.07078"
ENERGY = ("energy",)
RATIO = ("ratio",)

# Each row: function, formula, unbiased, conditions, source, provenance; then what differs from the defaults.
# fmt: off
ESTIMATORS: dict[str, EstimatorSpec] = {
    "none": EstimatorSpec(group.none, "0", True, IID, "REINFORCE", "code", takes_single=True),
    "batch_mean": EstimatorSpec(
        group.batch_mean, "mean_j R_j over the batch", False,
        "(1 − 1/N)·∇J with N the rollouts of the whole batch: shorter, direction intact",
        "REINFORCE with a batch baseline", "code", batch_coupled=True, shrinks_by="batch", takes_single=True,
    ),
    "batch_mean_loo": EstimatorSpec(
        group.batch_mean_loo, "mean_{j≠i} R_j over the batch", True, IID, "batch_mean without i", "proved",
        batch_coupled=True, takes_single=True,
    ),
    "group_mean": EstimatorSpec(
        group.group_mean, "mean_j R_j", False, "(1 − 1/N)·∇J: shorter, direction intact", "Dr. GRPO", "code",
        shrinks_by="group",
    ),
    "grpo": EstimatorSpec(
        group.grpo, "mean_j R_j, then A/(std_j R_j + 1e-6), ddof 1", False, "the scale depends on rollout i", "GRPO",
        "code", target="∇ 2·arcsin√p for binary rewards, p the success rate of the prompt",
    ),
    "rloo": EstimatorSpec(group.rloo, "mean_{j≠i} R_j", True, IID, "REINFORCE leave-one-out", "code"),
    "opo": EstimatorSpec(group.opo, "Σ_j L_j R_j / Σ_j L_j", False, SELF, "OPO", "code"),
    "opo_loo": EstimatorSpec(group.opo_loo, "Σ_{j≠i} L_j R_j / Σ_{j≠i} L_j", True, IID, "opo without i", "proved"),
    "length_power": EstimatorSpec(
        group.length_power, "Σ_j L_j^α R_j / Σ_j L_j^α", False, SELF,
        "α-weighted baseline, faabian.github.io/blog/alpha.html", "abstract", options=LengthOptions,
    ),
    "length_power_loo": EstimatorSpec(
        group.length_power_loo, "Σ_{j≠i} L_j^α R_j / Σ_{j≠i} L_j^α", True, IID, "length_power without i", "proved",
        options=LengthOptions,
    ),
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
        across.energy_regression,
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
    "krpo": EstimatorSpec(
        remembered.krpo, "x_i of a Kalman filter over R_1, …, R_i of the group, then A/(√P_i + 1e-8)", False,
        "mean over i of (1 − K_i)/(√P_i + 1e-8), times ∇J: direction intact", "KRPO, arXiv 2505.07527", "code",
        options=KalmanOptions, ordered=True,
    ),
    "ebpo": EstimatorSpec(
        remembered.ebpo,
        "(1 − S)·mean_j R_j + S·μ, S = (σ²/n)/(σ²/n + τ²), μ, σ², τ² of all rollouts and group means so far, "
        "then whitened over the batch", False, "the batch is part of μ, S and of the scale",
        "EBPO, arXiv 2602.05165; the authors' code was not seen", "abstract", uses=("state",), batch_coupled=True,
    ),
    "ebpo_loo": EstimatorSpec(
        remembered.ebpo_loo,
        "(1 − S)·mean_{j≠i} R_j + S·μ, S = (σ²/(n − 1))/(σ²/(n − 1) + τ²), μ, σ², τ² of earlier steps", True,
        f"{IID}; state from earlier steps", "ebpo without i and this batch", "proved", uses=("state",),
    ),
    "dbb": EstimatorSpec(
        remembered.dbb, "p̂ = α/(α + β), α = λα' + Σ_j R_j, β = λβ' + Σ_j (1 − R_j), then A/√(p̂(1 − p̂))", False,
        "the scale and p̂ depend on rollout i",
        "discounted Beta–Bernoulli, arXiv 2603.18444; the authors' code was not seen", "abstract",
        uses=("prompt", "state"), options=DiscountOptions, takes_single=True,
    ),
    "dbb_loo": EstimatorSpec(
        remembered.dbb_loo, "(λα' + Σ_{j≠i} R_j)/(λα' + λβ' + n − 1), α' and β' of the prompt's earlier epochs", True,
        f"{IID}; state from earlier steps", "dbb without i, not divided", "proved", uses=("prompt", "state"),
        options=DiscountOptions, takes_single=True,
    ),
    "trloo": EstimatorSpec(
        published.trloo, "mean_{j≠i} G_j of the turn, j with that turn", True, IID,
        "TRLOO of Dr. Kernel, arXiv 2602.05885", "code", needs=("turn",),
    ),
    "tempo": EstimatorSpec(
        published.tempo, "mean_j R_j + V(h_t) − V(h_{t+1}), then A/(std_j R_j), ddof 0", False,
        "V(h_{t+1}) depends on y_t, V and the scale on rollout i", "TEMPO (P2T), arXiv 2509.18314", "guess",
        needs=("token_id",),
    ),
    "tempo_loo": EstimatorSpec(
        published.tempo_loo, "mean_{j≠i} R_j, j sharing h_t, or else the longest prefix that any shares", True, IID,
        "the prefix value of tempo without i", "proved", needs=("token_id",),
    ),
    "classic_optimal": EstimatorSpec(
        group.classic_optimal, "Σ_j ‖S_j‖² R_j / Σ_j ‖S_j‖²", False, SELF,
        "the classic optimal scalar E[R‖S‖²]/E‖S‖²", "proved", needs=("rollout_norm_sq",),
    ),
    "classic_optimal_loo": EstimatorSpec(
        group.classic_optimal_loo, "Σ_{j≠i} ‖S_j‖² R_j / Σ_{j≠i} ‖S_j‖²", True, IID, "classic_optimal without i",
        "proved", needs=("rollout_norm_sq",),
    ),
    "opob": EstimatorSpec(
        group.opob, "Σ_j ρ_j² ‖S_j‖² R_j / Σ_j ρ_j² ‖S_j‖², ρ_j = Π_t ρ_{j,t}", False, SELF,
        "OPOB of VCPO, arXiv 2602.17616; learning rate × √(ESS/B)", "code", needs=("rollout_norm_sq", "ratio"),
    ),
    "sequence_optimal": EstimatorSpec(
        group.sequence_optimal, "Σ_j W_{j,T} R_j / Σ_j W_{j,T}", False, SELF, "classic_optimal with E‖S‖² = E W_T",
        "proved", needs=ENERGY, uses=RATIO,
    ),
    "sequence_optimal_loo": EstimatorSpec(
        group.sequence_optimal_loo, "Σ_{j≠i} W_{j,T} R_j / Σ_{j≠i} W_{j,T}", True, IID, "sequence_optimal without i",
        "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb": EstimatorSpec(
        group.otb, "Σ_j W_{j,t} G_{j,t} / Σ_j W_{j,t}, j alive at t", False, SELF, OTB, "code", needs=ENERGY,
        uses=RATIO, options=TailOptions, takes_gaps=False,
    ),
    "otb_loo": EstimatorSpec(
        group.otb_loo, "Σ_{j≠i} W_{j,t} G_{j,t} / Σ_{j≠i} W_{j,t}, j alive at t", True, IID_TAIL, "otb without i",
        "proved", needs=ENERGY, uses=RATIO, options=TailOptions, takes_gaps=False,
    ),
    "otb_carry": EstimatorSpec(
        group.otb_carry, "Σ_j W_{j,t} X_{j,t} / Σ_j W_{j,t}, all j; after the end X = R and W = W_T", False, SELF,
        "otb with finished rollouts carried along", "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb_carry_loo": EstimatorSpec(
        group.otb_carry_loo, "Σ_{j≠i} W_{j,t} X_{j,t} / Σ_{j≠i} W_{j,t}, all j ≠ i; after the end X = R and W = W_T",
        True, IID, "otb_carry without i", "proved", needs=ENERGY, uses=RATIO,
    ),
    "otb_turn": EstimatorSpec(
        group.otb_turn, "otb with t counting policy tokens across turns", False, SELF, OTB, "code", needs=ENERGY,
        uses=RATIO, options=TailOptions,
    ),
    "otb_turn_loo": EstimatorSpec(
        group.otb_turn_loo, "otb_loo with t counting policy tokens across turns", True, IID_TAIL, "otb_turn without i",
        "proved", needs=ENERGY, uses=RATIO, options=TailOptions,
    ),
    "token_optimal": EstimatorSpec(
        group.token_optimal, "Σ_j w_{j,t} G_{j,t} / Σ_j w_{j,t}, j alive at t", False, SELF,
        "the variance-optimal B_t* when tokens share no parameters", "proved", needs=ENERGY, uses=RATIO,
        options=TailOptions,
    ),
    "token_optimal_loo": EstimatorSpec(
        group.token_optimal_loo, "Σ_{j≠i} w_{j,t} G_{j,t} / Σ_{j≠i} w_{j,t}, j alive at t", True, IID_TAIL,
        "token_optimal without i", "proved", needs=ENERGY, uses=RATIO, options=TailOptions,
    ),
    "energy_ema": EstimatorSpec(
        group.energy_ema, "otb with W_t = λ W_{t−1} + w_t", False, SELF,
        "between token_optimal (λ = 0) and otb (λ = 1)", "proved", needs=ENERGY, uses=RATIO, options=DecayOptions,
    ),
    "energy_ema_loo": EstimatorSpec(
        group.energy_ema_loo, "otb_loo with W_t = λ W_{t−1} + w_t", True, IID_TAIL, "energy_ema without i", "proved",
        needs=ENERGY, uses=RATIO, options=DecayOptions,
    ),
    "position_optimal": EstimatorSpec(
        published.position_optimal, "B_t* = E[s_t · Σ_k s_k G_k] / E‖s_t‖²", True, f"{IID}; B* from other rollouts",
        "minimiser of the variance among position-dependent constants", "proved", needs=("position_baseline",),
        takes_single=True,
    ),
    "value": EstimatorSpec(
        published.value, "V(h_t); with γ or λ below 1, G_t − Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V(h_{t+1}) − V(h_t)",
        True, f"{IID}; a critic that has not seen these rollouts; γ = λ = 1", "actor-critic, GAE", "code",
        needs=("value",), options=ValueOptions, takes_single=True,
    ),
    "evpo": EstimatorSpec(
        remembered.evpo,
        "V(h_t) where Var(G_t − V(h_t)) < Var(G_t) over the batch's tokens, else mean_j R_j over the batch", False,
        "the switch looks at rollout i, and so does the batch mean",
        "EVPO, arXiv 2604.19485; the authors' code was not seen", "abstract", needs=("value",), batch_coupled=True,
        takes_single=True,
    ),
    "tvm": EstimatorSpec(
        published.tvm, "V(h_t), the critic fitted to the share of correct rollouts through h_t", True,
        f"{IID}; a critic that has not seen these rollouts", "TVM, arXiv 2407.12863", "abstract", needs=("value",),
        takes_single=True,
    ),
}
# fmt: on
# `otb_turn` is `otb` wherever there are no tool tokens
ESTIMATORS["blend_otb_regression"] = combined({"otb_turn": 0.5, "energy_regression": 0.5}, ESTIMATORS)


def registered(name: str) -> EstimatorSpec | None:
    """Return the EstimatorSpec of a stored name, of a portfolio too; None where the name is not known here."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    try:
        return portfolio(name, ESTIMATORS)
    except InputError:
        return None
