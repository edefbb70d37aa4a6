"""Statistics of the sampling check at each token: was y drawn from π = softmax(logits/τ)?

Every test has a statistic a_v that is known before y is drawn, so Σ_t (a_y − E_π a) has mean 0 and variance
Σ_t Var_π(a) if the tokens were drawn from π, whatever the prefixes are (a martingale). Tests of one setting also give
the token's log-probability under that setting. Nothing is sorted where counting does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)
"""Temperatures of the sampler over the stated one."""
TOP_P = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)
TOP_K = (1, 2, 3, 5, 8, 10, 20, 40, 50, 64, 100, 200)
PENALTIES = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5)
NOISES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4)
"""Standard deviations σ of logit noise; from 2 on, the distribution to second order in σ would be negative."""
LEAK = 1e-3
"""Share of tokens that a truncated sampler draws from π all the same: rounding moves tokens over its edge."""
MOST_SORTED = 4096
"""Larger vocabularies are not sorted for top-p but binned by log-probability."""
BINS, PER_NAT = 4096, 128
"""Bins, and bins in a nat."""


@dataclass(frozen=True)
class TokenTest:
    """One test of K tokens, float64 [K] each."""

    test: str
    parameter: float | None = None
    score: Tensor | None = None  # a_y − E_π a
    variance: Tensor | None = None  # Var_π(a)
    observed: Tensor | None = None  # a_y, where a counts
    logprob: Tensor | None = None  # log p(y) of the sampler with this setting, in nats


def direction_tests(pi: Tensor, statistics: Mapping[str, Tensor], y: Tensor) -> list[TokenTest]:
    """Return the score test of every statistic a [K, V], and the covariance of every two.

    `temperature` is a = log π, since ∂ log p_β(y)/∂β = log π_y + H at β = 1/temperature = 1. `probability` is a = π.
    A covariance is a test named `one*other` with a variance only.
    """
    weight = pi.sqrt()
    centred = {name: a - (pi * a).sum(-1, keepdim=True) for name, a in statistics.items()}
    scaled = {name: weight * a for name, a in centred.items()}
    tests = []
    for name, a in centred.items():
        variance = scaled[name].square().sum(-1).double()
        tests.append(TokenTest(name, None, a.gather(1, y)[:, 0].double(), variance))
    for one, other in combinations(statistics, 2):
        tests.append(TokenTest(f"{one}*{other}", None, variance=(scaled[one] * scaled[other]).sum(-1).double()))
    return tests


def temperature_tests(log_pi: Tensor, y: Tensor) -> list[TokenTest]:
    """Return the likelihood at every temperature of TEMPERATURES: p(y) = π_y^β / Σ_v π_v^β, β = 1/temperature."""
    drawn, power = log_pi.gather(1, y)[:, 0].double(), torch.empty_like(log_pi)
    tests = []
    for temperature in TEMPERATURES:
        # The largest π is at least 1/V, so no power of it is too small to be summed as it is.
        normaliser = torch.mul(log_pi, 1 / temperature, out=power).exp_().sum(-1).double().log()
        tests.append(TokenTest("temperature", temperature, logprob=drawn / temperature - normaliser))
    return tests


def noise_tests(log_pi: Tensor, y: Tensor) -> list[TokenTest]:
    """Return the likelihood of fresh Gaussian noise on every logit, for every standard deviation σ of NOISES.

    E p(y) = π_y (1 + σ²(Σπ² − π_y)) + O(σ⁴): a distribution itself while σ < 2. Its score in σ² is −(π_y − Σπ²), the
    test `probability`. As recorded by the sampler, log p(y) has the noise in it, so no setting predicts it.
    """
    pi, drawn = log_pi.exp(), log_pi.gather(1, y)[:, 0].double()
    excess = drawn.exp() - pi.square().sum(-1).double()
    return [TokenTest("noise", sigma, logprob=drawn + torch.log1p(-(sigma**2) * excess)) for sigma in NOISES]


def truncation_tests(log_pi: Tensor, y: Tensor) -> list[TokenTest]:
    """Return, for every top-p and top-k, the test that counts tokens outside of what the sampler keeps.

    A token is outside top-p p where the likelier ones have mass S_y ≥ p, outside top-k k where there are k of them.
    M, the mass that is kept, makes a = 1[outside] a variable of mean 1 − M and variance M(1 − M). The sampler has
    p(y) = π_y/M inside; with a leak of 0.001, p(y) = π_y (0.999/M + 0.001) inside and 0.001 π_y outside.
    """
    drawn, pi = log_pi.gather(1, y), log_pi.exp()
    likelier = log_pi > drawn
    top_k = [k for k in TOP_K if k < log_pi.shape[1]]
    mass = pi.topk(max(top_k, default=1), -1).values.double().cumsum(-1).clamp(max=1.0)
    rank = likelier.sum(-1)
    settings = [("top_k", float(k), mass[:, k - 1], rank >= k) for k in top_k]
    if log_pi.shape[1] <= MOST_SORTED:
        whole = pi.sort(-1, descending=True).values.double().cumsum(-1).clamp(max=1.0)
        place = (pi * likelier).sum(-1).double()
        settings += [("top_p", p, _reaching(whole, p)[1], place >= p) for p in TOP_P]
    else:
        whole, bins = _mass_by_bin(log_pi, pi, y)
        for p in TOP_P:
            last, kept = _reaching(whole, p)
            settings.append(("top_p", p, kept, bins > last))
    tests = []
    for name, setting, kept, outside in settings:
        out = outside.double()
        factor = torch.where(outside, torch.full_like(kept, LEAK), (1 - LEAK) / kept + LEAK)
        logprob = drawn[:, 0].double() + factor.log()
        tests.append(TokenTest(name, setting, out - (1 - kept), kept * (1 - kept), out, logprob))
    return tests


def _reaching(mass: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return where cumulative mass [K, n] first reaches p, and the mass there [K]."""
    at = torch.searchsorted(mass, mass.new_full((len(mass), 1), p)).clamp(max=mass.shape[1] - 1)
    return at[:, 0], mass.gather(1, at)[:, 0]


def _mass_by_bin(log_pi: Tensor, pi: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cumulative mass by bins of log-probability below the likeliest [K, BINS], and the bin of y [K].

    Sorting a large vocabulary costs as much as the model. What is kept ends at a bin's edge here, so at most 1/128 nat
    more is kept than the sampler keeps; the test is exact for what is kept here.
    """
    bins = ((log_pi.amax(-1, keepdim=True) - log_pi) * PER_NAT).clamp_(max=BINS - 1).long()
    mass = pi.new_zeros(len(pi), BINS).scatter_add_(1, bins, pi)
    return mass.double().cumsum(-1).clamp(max=1.0), bins.gather(1, y)[:, 0]


def repetition_tests(
    seen: Tensor, in_context: Tensor, drawn: Tensor, normaliser: Tensor, temperature: float
) -> list[TokenTest]:
    """Return the test of a repetition penalty ρ, and the likelihood at every one of PENALTIES.

    The sampler divides positive logits of tokens that its context holds by ρ and multiplies negative ones by ρ, before
    the temperature (transformers, vLLM). U = d_y − E_π d with d_v = −|z_v|/τ for tokens in the context, otherwise 0.
    `seen` holds the logits z of the context's distinct tokens [K, C], `in_context` whether each had come [K, C],
    `drawn` the index of y among them, −1 where it had not come, and its logit [K, 2], `normaliser` log Σ e^{z/τ} [K].
    """
    z, log_z = seen.double(), normaliser[:, None]
    pi = torch.where(in_context, torch.exp(z / temperature - log_z), 0.0)
    d = -z.abs() / temperature
    mean = (pi * d).sum(-1)
    repeated, own = drawn[:, 0] >= 0, drawn[:, 1]
    score = torch.where(repeated, -own.abs() / temperature, 0.0) - mean
    tests = [TokenTest("repetition", None, score, ((pi * d**2).sum(-1) - mean**2).clamp(min=0.0))]
    rest = (1 - pi.sum(-1)).clamp(min=0.0)
    for penalty in PENALTIES:
        moved = torch.where(z > 0, z / penalty, z * penalty) / temperature - log_z
        mass = rest + torch.where(in_context, moved.exp(), 0.0).sum(-1)
        changed = torch.where(own > 0, own / penalty, own * penalty)
        logit = torch.where(repeated, changed, own) / temperature - normaliser
        tests.append(TokenTest("repetition", penalty, logprob=logit - mass.log()))
    return tests


class LearnedDirection:
    """What earlier tokens taught about how the sampler's output layer differs: a test of other weights.

    a_t = φ_tᵀ D, D [r, V] from residuals e_y − π of earlier passes, φ_t = (1, a random projection of the hidden state).
    Any lasting difference of logits that is linear in φ shows as Σ_t (a_y − E_π a) > 0.
    """

    def __init__(self, vocabulary: int, width: int, features: int, device: torch.device):
        generator = torch.Generator("cpu").manual_seed(0)
        kept = min(width, features)
        projection = torch.randn(width, kept, generator=generator, device="cpu") / width**0.5
        self.projection = (torch.eye(width, device=device) if kept == width else projection).to(device)
        self.total = torch.zeros(kept + 1, vocabulary, device=device)  # Σ φ (e_y − π)ᵀ
        self.scale = torch.zeros(vocabulary, device=device)  # Σ π(1 − π)

    def features(self, hidden: Tensor) -> Tensor:
        """Return φ [K, r]: 1, and the hidden states scaled to mean square 1."""
        h = hidden.float()
        h = h / h.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        return torch.cat([h.new_ones(len(h), 1), h @ self.projection], -1)

    def direction(self) -> Tensor:
        """Return D [r, V] as learned so far."""
        return self.total / (self.scale + 1.0)

    def learn(self, residual: Tensor, scale: Tensor) -> None:
        """Add a pass's Σ φ (e_y − π)ᵀ [r, V] and Σ π(1 − π) [V]."""
        self.total += residual
        self.scale += scale


def repeats(group: Sequence[int], rows: Sequence[Sequence[int]], difference: Sequence[Sequence[float]]) -> "Repeats":
    """Return how far rollouts agree where they are equal: the same prompt, the same tokens up to this one.

    `difference` is log-probability recorded − scored of every completion token. In a class of m equal prefixes,
    Σ_c ((Σδ)² − Σδ²)/(m − 1) over Σ_c Σδ² is 1 if the same prefix always has the same difference, and near 0 if every
    token has one of its own.
    """
    classes: dict[int, list[float]] = {}
    for key, ids, delta in zip(group, rows, difference, strict=True):
        for token, one in zip(ids, delta, strict=True):
            key = hash((key, token))  # Of the whole prefix
            if one == one:
                classes.setdefault(key, []).append(one)
    agree, total, n = 0.0, 0.0, 0
    for values in classes.values():
        if len(values) > 1:
            square = sum(x * x for x in values)
            agree += (sum(values) ** 2 - square) / (len(values) - 1)
            total, n = total + square, n + len(values)
    return Repeats(n, agree, total)


@dataclass(frozen=True)
class Repeats:
    """Agreement of differences at equal prefixes; `agree`/`total` is their intraclass correlation."""

    n_tokens: int
    agree: float
    total: float
