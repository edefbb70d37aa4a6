"""Frozen records that pass between the rooms; arrays are NumPy, float64 unless a field says otherwise.

Letters: P prompts, N rollouts, T padded completion length, L padded prompt + completion length, M rows of weights
(estimators), K sketch directions. Groups are ragged: an int vector `group` [N] says which rollouts belong together.
Column t of an [N, T] array describes completion token y_t: its own log-probability, its own score.
`mask` is true where the policy sampled the token; entries outside it are never read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otb_analysis.errors import InputError, nearest

Float = NDArray[np.float64]
Float32 = NDArray[np.float32]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

Label = tuple[str, str]  # (estimator, energy source), as stored
FinishReason = Literal["stop", "length", "turns", "unknown"]
"""How a rollout ended: end token, length budget used up, turn limit."""


@dataclass(frozen=True)
class Proved:
    """What is proved of a run's estimators and need not be estimated; made by `estimators`, read by `statistics`."""

    # c = ⟨m, ∇J⟩/‖∇J‖² of estimators whose mean is c·∇J: 1 for the unbiased ones
    projection: Mapping[Label, float] = field(default_factory=dict)
    # Unbiased ones whose gradients of different prompts are independent: their mean stands for ∇J
    truth: frozenset[Label] = frozenset()


@dataclass(frozen=True)
class ScoreNorms:
    """Squared norms of per-token scores; made by `gradients`, read by `energies` and the store."""

    # ‖s_{n,t}‖² [N, L], s the gradient of the *log-probability* of token (n, t) over the scope; no 1/N, no advantage
    # factor; zero outside the mask
    norm_sq: Float
    logprob: Float  # log π(y_{n,t}) in nats [N, L], zero outside the mask
    engine: str  # Which engine ran
    path_norm_sq: Float | None = None  # ‖Σ_{j≤t} s_{n,j}‖² [N, L], or None when it was not asked for
    norm_sq_stderr: Float | None = None  # Standard error of `norm_sq` [N, L] where it is an estimate, else None
    features: NDArray[np.float32] | None = None  # float32 [N, L, K] with E⟨f_t, f_k⟩ = s_t·s_k, or None
    rollout_norm_sq: Float | None = None  # ‖Σ_t s_{n,t}‖² of whole rollouts [N], or None when it was not asked for


@dataclass(frozen=True)
class SampledNorms:
    """Exact squared norms of a random part of the tokens; made by `gradients`, read by `statistics` and the store."""

    norm_sq: Float  # ‖s_{n,t}‖² [N, L] where the token was drawn, NaN at the other tokens of the mask, zero outside it
    inclusion_prob: Float  # Probability with which each token of the mask was drawn, in (0, 1]; zero outside it [N, L]
    size: Float  # What the probabilities are proportional to, up to their uniform part, zero outside the mask [N, L]
    engine: str  # Which engine ran

    @property
    def drawn(self) -> Bool:
        """True at the tokens that were measured [N, L]."""
        return (self.inclusion_prob > 0) & ~np.isnan(self.norm_sq)


@dataclass(frozen=True)
class Attribution:
    """How far each token's score points along a direction, by default the batch gradient; made by `gradients`.

    With ḡ = Σ weights·s and no other direction, Σ share = norm_sq = ‖ḡ‖²: each share is the token's signed part of the
    squared gradient norm. Along another direction d, Σ share = ⟨ḡ, d⟩.
    """

    share: Float  # weights · alignment [N, L], zero outside the mask
    alignment: Float  # s_{n,t}·direction [N, L], zero outside the mask: the change of log π per unit step along it
    norm_sq: float  # ‖direction‖², from the direction itself, so that it checks the shares
    method: str  # What ran: "jvp", "difference" or "reference"
    step: float | None = None  # ε of the differences, else None
    # Relative distance between the slopes at ε and those of a trial at a longer step, on the trial's tokens, else None;
    # the trial's own error is part of it
    step_error: float | None = None
    # (Σ share − norm_sq)/norm_sq, which exact shares would make 0, where the direction is ḡ itself and not zero, else
    # None. Shares are never rescaled by it.
    sum_error: float | None = None


@dataclass(frozen=True)
class SignalNoise:
    """Each token's share of ‖ḡ‖², ḡ = Σ_p ḡ_p, split by whose gradient it points along; made by `gradients`.

    signal + noise is the token's share; Σ noise = Σ_p ‖ḡ_p‖² and Σ signal = Σ_{p≠q} ⟨ḡ_p, ḡ_q⟩.
    """

    signal: Float  # weights · s·(ḡ − ḡ_p) [N, L]: did the token help the *other* prompts? Zero outside the mask
    noise: Float  # weights · s·ḡ_p [N, L]: its part in its own prompt's gradient only. Zero outside the mask.
    norm_sq: float  # ‖ḡ‖²
    group_norm_sq: Float  # ‖ḡ_p‖² [P], by the sorted distinct values of the group vector


@dataclass(frozen=True)
class NormalEquations:
    """What a weighted least-squares fit remembers of its tokens; made by `estimate`, given back to it a step later.

    Tokens of earlier steps count less: S ← λS + (this step's sums).
    """

    features: tuple[str, ...]  # Names of φ, in the order of the entries below
    gram: Float  # Σ w φφᵀ [K, K]
    moment: Float  # Σ w φ R [K]


@dataclass(frozen=True)
class Tallies:
    """What a baseline with a memory has counted over earlier steps; made by `estimate`, given back to it a step later.

    A row per prompt for `dbb`, α and β; for `ebpo` row 0 of all rollouts' returns and row 1 of all group means, each
    with how many they were, their mean and Σ (x − mean)².
    """

    key: Int  # What each row is of, ascending [K]
    sums: Float  # [K, M]


@dataclass(frozen=True)
class EstimatorInputs:
    """What an advantage estimator may look at; made by `training` and the store's readers, read by `estimate`."""

    reward: Float  # Reward per token [N, T]; one terminal reward sits on the last policy token
    mask: Bool  # True at tokens the policy sampled [N, T]
    group: Int  # Prompt of each rollout [N]; any integers, ragged groups allowed
    # Token energy w_{n,t} = ‖s_{n,t}‖², exact or a proxy [N, T], non-negative inside the mask
    energy: Float | None = None
    rollout_norm_sq: Float | None = None  # ‖Σ_t s_{n,t}‖² [N], exact
    # B_t per token for `position_optimal` [N, T], from scores on *other* rollouts
    position_baseline: Float | None = None
    value: Float | None = None  # V(h_t) before y_t [N, T], from the critic as it was before this step's update
    turn: Int | None = None  # Index of the turn a token belongs to [N, T]
    token_id: Int | None = None  # Token ids [N, T], for the estimators that share prefixes
    ratio: Float | None = None  # Importance ratio ρ_{n,t} of each token [N, T]
    entropy: Float | None = None  # Entropy in nats of the distribution each token was drawn from [N, T]
    # A number of each rollout's prompt [N], the same whenever it is sampled, for memories by prompt; below 2^53
    prompt: Int | None = None
    # `Estimate.state` of the step before, for the estimators that remember earlier steps; None at the first one
    state: NormalEquations | Tallies | None = None


@dataclass(frozen=True)
class Estimate:
    """One estimator's answer, zero outside the mask; read by `training`, `statistics` and the store."""

    baseline: Float  # B_{n,t} [N, T]; NaN where another trainer did not tell it
    advantage: Float  # A_{n,t} [N, T]: what multiplies the score; G − B, rescaled where the estimator says so
    fallback: Bool  # True where the formula was undefined, so the fallback was used [N, T]
    # What the next step gives back as `EstimatorInputs.state`; None where the estimator remembers nothing
    state: NormalEquations | Tallies | None = None


@dataclass(frozen=True)
class LogitStats:
    """Forward-only statistics of the distribution each token was drawn from; made by `logit_stats`."""

    logprob: Float  # log π_y in nats
    entropy: Float  # H = −Σ_v π_v log π_v in nats
    sum_pi_sq: Float  # Σ_v π_v²
    energy: Float  # ‖e_y − π‖² = (1 − π_y)² + Σ_{v≠y} π_v², in [0, 2], computed without cancellation
    hidden_norm_sq: Float | None  # ‖h‖² of the final hidden state, or None when only logits were given
    pi_variance: Float  # Var(π_y) = Σ_v π_v³ − (Σ_v π_v²)², of the sampling certificate
    logprob_variance: Float  # Var(log π_y) = Σ_v π_v log² π_v − H², of the sampling certificate


@dataclass(frozen=True)
class Reduced:
    """The part of a Gram matrix that compares estimators with given references: much less than M² blocks."""

    own: Float  # ⟨g_{m,p}, g_{m,p'}⟩ [M, P, P]
    products: Float  # Σ_p ⟨g_{m,p}, g_{m',p}⟩ [M, M]
    # The mean of these estimators with every m [M, P, P], and with itself [P, P]
    means: Mapping[frozenset[Label], tuple[Float, Float]]


@dataclass(frozen=True)
class Gram:
    """Inner products of the group gradients of one step; made by `measurement`, read by `statistics`."""

    inner: Float  # ⟨g_{m,p}, g_{m',p'}⟩ [M, M, P, P], g_{m,p} the *mean* gradient of prompt p's group under estimator m
    labels: tuple[Label, ...]  # (estimator, energy source) of each m
    n_rollouts: int  # Rollouts behind it
    # Name of each prompt [P], any hashable; None means that every prompt is a new one. Prompts named alike are one
    # cluster, within a step and across steps.
    prompt: tuple[object, ...] | None = None
    groups: Int | None = None  # Index of each prompt within the step [P]; None means 0 … P−1
    sketch_dim: int | None = None  # Buckets of the count sketches that it was estimated from; None where it is exact
    # What was kept of it for some references; `inner` is then empty, [M, M, 0, 0]. None where it is whole
    kept: Reduced | None = None
    # What `statistics` has derived from it, so that the next question does not derive it again
    derived: dict[object, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Check the shapes."""
        shape, m = np.shape(self.inner), len(self.labels)
        if len(shape) != 4 or shape[:2] != (m, m) or shape[2] != shape[3]:
            raise InputError(f"inner has shape {shape} but there are {m} labels; pass the Gram matrix as [M, M, P, P].")
        if len(set(self.labels)) != m:
            raise InputError(f"labels are {self.labels}; name every (estimator, energy source) once.")
        for name, entries in (("prompt", self.prompt), ("groups", self.groups)):
            if entries is not None and len(entries) != self.n_prompts:
                raise InputError(
                    f"{name} has {len(entries)} entries but inner has {self.n_prompts} prompts; pass one per prompt."
                )
        if self.groups is not None and len(np.unique(self.groups)) < self.n_prompts:
            raise InputError(f"groups are {self.groups}; name every group once.")

    @property
    def n_prompts(self) -> int:
        """Groups P."""
        return (self.inner if self.kept is None else self.kept.own).shape[-1]

    @property
    def group_index(self) -> Int:
        """Index of each prompt within the step [P]."""
        return np.arange(self.n_prompts) if self.groups is None else np.asarray(self.groups, dtype=np.int64)

    @property
    def products(self) -> Float:
        """Σ_p ⟨g_{m,p}, g_{m',p}⟩ [M, M]."""
        return np.einsum("mnpp->mn", self.inner) if self.kept is None else self.kept.products

    def measured(self, reference: "Label | frozenset[Label]") -> frozenset[Label]:
        """Return the reference, or those of several, that are among the labels."""
        if (key := ("measured", reference)) not in self.derived:
            several = reference if isinstance(reference, frozenset) else frozenset((reference,))
            self.derived[key] = several & set(self.labels)
        return self.derived[key]

    def stands(self, reference: "Label | frozenset[Label]") -> bool:
        """Tell whether the `blocks` of every label can take those of the reference that are among the labels."""
        return self.kept is None or not (measured := self.measured(reference)) or measured in self.kept.means

    @property
    def mean_norm_sq(self) -> dict[Label, float]:
        """‖Σ_p g_{m,p}/P‖² of each label m, the squared length of the step's own gradient; NaN without prompts."""
        if "mean_norm_sq" not in self.derived:
            diagonal = np.einsum("mmpq->mpq", self.inner) if self.kept is None else self.kept.own
            means = diagonal.mean(axis=(1, 2)) if self.n_prompts else np.full(len(self.labels), np.nan)
            self.derived["mean_norm_sq"] = dict(zip(self.labels, means.tolist(), strict=True))
        return self.derived["mean_norm_sq"]

    def blocks(self, labels: Sequence[Label], reference: "Label | frozenset[Label]") -> Float:
        """Return ⟨m, m⟩, ⟨m, reference⟩ and ⟨reference, reference⟩ of each label m as [n, 3, P, P].

        Args:
            labels: The estimators m [n].
            reference: The estimator that stands for ∇J; of several, the mean of those that are among the labels.

        Returns:
            float64 [n, 3, P, P]; NaN for a reference that is not among the labels and where an entry is not finite.

        Raises:
            InputError: A label is not among the labels, or the matrix was reduced without the reference.
        """
        place = {label: m for m, label in enumerate(self.labels)}
        if unknown := [label for label in labels if label not in place]:
            raise InputError(f"label is {unknown[0]}; {nearest(str(unknown[0]), map(str, self.labels))}")
        rows, measured = [place[label] for label in labels], self.measured(reference)
        block = np.full((len(rows), 3, self.n_prompts, self.n_prompts), np.nan)
        block[:, 0] = self.inner[rows, rows] if self.kept is None else self.kept.own[rows]
        if self.kept is not None and measured == set(labels) and len(rows) == 1:
            block[:, 1:] = self.kept.own[rows[0]]
        elif self.kept is not None and measured:
            if measured not in self.kept.means:
                raise InputError(
                    f"this Gram matrix was reduced without {', '.join(map(str, sorted(measured)))} as reference; "
                    "read the whole one with RunStore.grams."
                )
            with_every, block[:, 2] = self.kept.means[measured]
            block[:, 1] = with_every[rows]
        elif measured:
            several = [self.labels.index(one) for one in sorted(measured)]
            key = ("mean product", *several)  # every label asks for the same ones
            if key not in self.derived:
                self.derived[key] = np.mean([self.inner[r, several].mean(axis=0) for r in several], axis=0)
            block[:, 1], block[:, 2] = self.inner[np.ix_(rows, several)].mean(axis=1), self.derived[key]
        block[~np.isfinite(block)] = np.nan
        return block

    def reduced(self, references: Iterable["Label | frozenset[Label]"]) -> "Gram":
        """Return what `blocks` with these references, and `products`, need: much less than M² blocks."""
        every, means = np.arange(len(self.labels)), dict[frozenset[Label], tuple[Float, Float]]()
        for measured in {self.measured(reference) for reference in references} - {frozenset[Label]()}:
            rows = np.array([self.labels.index(label) for label in sorted(measured)])
            # One m at a time: all products with several references at once are tens of MB.
            with_every = np.stack([self.inner[m, rows].mean(axis=0) for m in every])
            means[measured] = with_every, with_every[rows].mean(axis=0)
        kept = Reduced(self.inner[every, every], self.products, means)
        return replace(self, inner=np.empty((len(every), len(every), 0, 0)), groups=self.group_index, kept=kept)
