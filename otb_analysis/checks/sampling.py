"""The sampling check of a step: was every token y drawn from π = softmax(logits/τ)? Sums of all tests.

Every test has a statistic a_v that is known before y is drawn, so Σ_t (a_y − E_π a) has mean 0 and variance
Σ_t Var_π(a) if the tokens were drawn from π, whatever the prefixes are (a martingale). Tests of one setting also give
the token's log-probability under that setting. They are collected from the logits of a scoring pass while they exist;
nothing is sorted where counting does.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from otb_analysis.checks.sampling_report import SUMS
from otb_analysis.devices import working_set
from otb_analysis.measurement.forward import PolicyLogits
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int

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
"""Larger vocabularies are not sorted for top-p, which costs as much as the model, but binned by log-probability."""
BINS, PER_NAT = 4096, 128
"""Bins, and bins in a nat."""
ENTRIES = 1 << 19
"""Entries of the logits, and of the contexts, that are looked at at once on a CPU: some buffers of 2 MB."""
FEATURES, LEARNED = 128, 1 << 21
"""Most directions of the hidden state in which a difference of weights is learned, and most entries of what is."""
FLOAT32, BFLOAT16 = 1e-3, 0.05
"""Log-probabilities of the same weights in another engine differ by less: in float32, and mostly in bfloat16."""
BY_POSITION = ("temperature", "probability")
"""Score tests that are kept by position."""
Key = tuple[str, float | None, int | None]


@dataclass(frozen=True)
class TokenTest:
    """One test of K tokens, float64 [K] each."""

    test: str
    parameter: float | None = None
    score: Tensor | None = None  # a_y − E_π a
    variance: Tensor | None = None  # Var_π(a)
    observed: Tensor | None = None  # a_y, where a counts
    logprob: Tensor | None = None  # log p(y) of the sampler with this setting, in nats


@dataclass
class SamplingCheck:
    """Sums of one step, made by `observe` pass by pass; the learned direction goes on from step to step.

    Memory: a few tiles of logits, and at most 8 MB for the learned direction.

    Args:
        every: 1 looks at all tokens, k at every kth of a completion, from position `first` < k on. Which these are does
            not hang on what is drawn, so every test holds for them alone.
        first: Position of the first of them.
    """

    every: int = 1
    first: int = 0
    _sums: dict[Key, dict[str, float]] = field(init=False, default_factory=dict)
    _learned: "LearnedDirection | None" = field(init=False, default=None)

    @torch.no_grad()
    def observe(self, part: PolicyLogits) -> None:
        """Add the policy tokens of a forward pass."""
        vocabulary, device = part.logits.shape[1], part.logits.device
        if self._learned is None:
            kept = max(1, min(FEATURES, LEARNED // vocabulary))
            self._learned = LearnedDirection(vocabulary, part.hidden.shape[1], kept, device)
        learned = self._learned
        direction = learned.total / (learned.scale + 1.0)
        # φ [K, r]: 1, and the hidden states scaled to mean square 1.
        hidden = part.hidden.float()
        hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        features = torch.cat([hidden.new_ones(len(hidden), 1), hidden @ learned.projection], -1)
        residual, scale = torch.zeros_like(learned.total), torch.zeros_like(learned.scale)
        distinct, column = distinct_tokens(part.rollouts, device)
        start = torch.as_tensor(part.rollouts.prompt_length, device=device)
        recorded = torch.as_tensor(part.rollouts.by_token(part.rollouts.behavior_logprob), device=device)
        size = max(1, working_set(device, ENTRIES) // max(vocabulary, distinct.shape[1]))
        for rows in torch.nonzero(part.token % self.every == self.first)[:, 0].split(size):
            raw, y = part.logits[rows].float(), part.targets[rows, None]
            log_pi = (raw / part.temperature).log_softmax(-1)
            row, token = part.row[rows], part.token[rows]
            pi = log_pi.exp()
            statistics = {"temperature": log_pi, "probability": pi, "other_weights": features[rows] @ direction}
            in_context = column[row] < (start[row] + token)[:, None]
            tests = direction_tests(pi, statistics, y) + likelihood_tests(log_pi, y) + truncation_tests(log_pi, y)
            tests += repetition_tests(raw, log_pi, y, distinct[row], in_context, part.temperature)
            # Beside the sums: what a setting gains over the stated sampler, and leaves of recorded log-probabilities.
            logprob, given, at = log_pi.gather(1, y)[:, 0].double(), recorded[row, token], token.cpu().numpy()
            known = ~torch.isnan(given)
            for test in tests:
                columns = {"score": test.score, "variance": test.variance, "observed": test.observed}
                if test.logprob is not None:
                    columns["gain"] = test.logprob - logprob
                    if bool(known.any()):
                        columns["residual_sq"] = torch.where(known, given - test.logprob, 0.0).square()
                values = {name: x.cpu().numpy() for name, x in columns.items() if x is not None}
                by_position = test.test in BY_POSITION and test.parameter is None
                self._sum(test.test, test.parameter, values, at if by_position else None, len(at))
            scale += (pi * (1 - pi)).sum(0)
            residual -= features[rows].T @ pi
            residual.index_add_(1, y[:, 0], features[rows].T)
        # Only now: a direction learned from these tokens would agree with them.
        learned.total += residual
        learned.scale += scale

    def _sum(self, test: str, parameter: float | None, columns: dict[str, Float], token: Int | None, n: int) -> None:
        """Add columns [n], by bins of their positions where `token` has these: 0, 1, 2, 4, 8 and so on."""
        parts: dict[int | None, Bool] = {None: np.ones(n, bool)}
        if token is not None:
            bins = np.where(token > 0, 2 ** np.floor(np.log2(np.maximum(token, 1))).astype(np.int64), 0)
            parts = {start: bins == start for start in np.unique(bins).tolist()}
        for start, rows in parts.items():
            sums = self._sums.setdefault((test, parameter, start), defaultdict(float))
            sums["n_tokens"] += int(rows.sum())
            for name, values in columns.items():
                sums[name] += float(values[rows].sum())

    def rows(self, rollouts: Rollouts, table: TokenTable) -> dict[str, object]:
        """Return the step's rows of the table `sampling`, and begin anew.

        The sampler's own log-probabilities add tests, where it recorded them, of δ = recorded − scored. `recorded`, by
        position: score and gain Σδ, variance Σ‖e_y − π‖² (logit noise makes Var δ σ² times it), observed
        Σ1[|δ| > 0.05], residual_sq Σδ². `beyond_rounding` counts |δ| > 0.001. `repeated`: see `repeats`.
        """
        seen = np.arange(table.mask.shape[1]) % self.every == self.first
        inside = table.mask & seen & ~np.isnan(table.behavior_logprob)
        if inside.any():
            delta = np.where(inside, table.behavior_logprob - table.stats.logprob, np.nan)
            n, t = np.nonzero(inside)
            d = delta[n, t]
            columns = {"score": d, "variance": table.stats.energy[n, t], "gain": d, "residual_sq": d**2}
            columns["observed"] = (np.abs(d) > BFLOAT16).astype(float)
            self._sum("recorded", None, columns, t, len(d))
            over = {"observed": (np.abs(d) > FLOAT32).astype(float)}
            self._sum("beyond_rounding", FLOAT32, over, None, len(d))
            ids = [row[present].tolist() for row, present in zip(table.token_id, table.present, strict=True)]
            values = [row[present].tolist() for row, present in zip(delta, table.present, strict=True)]
            n_alike, agree, total = repeats(table.group.tolist(), ids, values)
            self._sums[("repeated", None, None)] = {"n_tokens": n_alike, "score": agree, "variance": total}
        keys, sums = list(self._sums), list(self._sums.values())
        self._sums = {}
        named: dict[str, object] = {
            name: [key[i] for key in keys] for i, name in enumerate(("test", "parameter", "position"))
        }
        return named | {name: [one.get(name) for one in sums] for name in SUMS}


def distinct_tokens(rollouts: Rollouts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each rollout's distinct tokens, prompt included, and the column where each comes first, [N, C] both."""
    by_rollout = [np.unique(ids, return_index=True) for ids in rollouts.input_ids]
    shape = len(by_rollout), max(len(ids) for ids, _ in by_rollout)
    ids, column = np.zeros(shape, np.int64), np.full(shape, rollouts.input_ids.shape[1])
    for n, (distinct, first) in enumerate(by_rollout):
        ids[n, : len(distinct)], column[n, : len(distinct)] = distinct, first
    return torch.as_tensor(ids, device=device), torch.as_tensor(column, device=device)


def direction_tests(pi: Tensor, statistics: Mapping[str, Tensor], y: Tensor) -> list[TokenTest]:
    """Return the score test of every statistic a [K, V], and the covariance of every two.

    `temperature` is a = log π, since ∂ log p_β(y)/∂β = log π_y + H at β = 1/temperature = 1. `probability` is a = π.
    A covariance is a test named `one*other` with a variance only; third and fourth central moments are tests named
    `one^3` and `one^4` with a score only.
    """
    weight = pi.sqrt()
    centred = {name: a - (pi * a).sum(-1, keepdim=True) for name, a in statistics.items()}
    scaled = {name: weight * a for name, a in centred.items()}
    tests = []
    for name, a in centred.items():
        square = scaled[name].square()
        tests.append(TokenTest(name, None, a.gather(1, y)[:, 0].double(), square.sum(-1).double()))
        cube = square * a
        tests.append(TokenTest(f"{name}^3", None, cube.sum(-1).double()))
        tests.append(TokenTest(f"{name}^4", None, (cube * a).sum(-1).double()))
    for one, other in combinations(statistics, 2):
        tests.append(TokenTest(f"{one}*{other}", None, variance=(scaled[one] * scaled[other]).sum(-1).double()))
    return tests


def likelihood_tests(log_pi: Tensor, y: Tensor) -> list[TokenTest]:
    """Return the likelihood at every temperature of TEMPERATURES and every logit noise of NOISES.

    Temperature: p(y) = π_y^β / Σ_v π_v^β, β = 1/temperature. Fresh Gaussian noise of standard deviation σ on every
    logit: E p(y) = π_y (1 + σ²(Σπ² − π_y)) + O(σ⁴), a distribution itself while σ < 2. Its score in σ² is
    −(π_y − Σπ²), the test `probability`. As recorded by the sampler, log p(y) has the noise in it, so no setting
    predicts it.
    """
    drawn, power, tests = log_pi.gather(1, y)[:, 0].double(), torch.empty_like(log_pi), []
    for temperature in TEMPERATURES:
        # The largest π is at least 1/V, so no power of it is too small to be summed as it is.
        normaliser = torch.mul(log_pi, 1 / temperature, out=power).exp_().sum(-1).double().log()
        tests.append(TokenTest("temperature", temperature, logprob=drawn / temperature - normaliser))
    excess = drawn.exp() - log_pi.exp().square().sum(-1).double()
    noisy = [TokenTest("noise", sigma, logprob=drawn + torch.log1p(-(sigma**2) * excess)) for sigma in NOISES]
    return tests + noisy


def truncation_tests(log_pi: Tensor, y: Tensor) -> list[TokenTest]:
    """Return, for every top-p and top-k, the test that counts tokens outside of what the sampler keeps.

    A token is outside top-p p where the likelier ones have mass S_y ≥ p, outside top-k k where there are k of them.
    M, the mass that is kept, makes a = 1[outside] a variable of mean 1 − M and variance M(1 − M). The sampler has
    p(y) = π_y/M inside; with a leak of 0.001, p(y) = π_y (0.999/M + 0.001) inside and 0.001 π_y outside.

    For top-p, mass is cumulated over sorted tokens, or in a large vocabulary over bins of log-probability below the
    likeliest: what is kept ends at a bin's edge there, so at most 1/128 nat more is kept than the sampler keeps; the
    test is exact for what is kept here.
    """
    drawn, pi = log_pi.gather(1, y), log_pi.exp()
    likelier = log_pi > drawn
    top_k = [k for k in TOP_K if k < log_pi.shape[1]]
    mass = pi.topk(max(top_k, default=1), -1).values.double().cumsum(-1).clamp(max=1.0)
    rank = likelier.sum(-1)
    settings = [("top_k", float(k), mass[:, k - 1], rank >= k) for k in top_k]
    is_sorted = log_pi.shape[1] <= MOST_SORTED
    if is_sorted:
        parts, place = pi.sort(-1, descending=True).values, (pi * likelier).sum(-1).double()
    else:
        bins = ((log_pi.amax(-1, keepdim=True) - log_pi) * PER_NAT).clamp_(max=BINS - 1).long()
        parts, place = pi.new_zeros(len(pi), BINS).scatter_add_(1, bins, pi), bins.gather(1, y)[:, 0]
    whole = parts.double().cumsum(-1).clamp(max=1.0)
    for p in TOP_P:
        reached = torch.searchsorted(whole, whole.new_full((len(whole), 1), p)).clamp(max=whole.shape[1] - 1)
        outside = place >= p if is_sorted else place > reached[:, 0]
        settings.append(("top_p", p, whole.gather(1, reached)[:, 0], outside))
    tests = []
    for name, setting, kept, outside in settings:
        out = outside.double()
        factor = torch.where(outside, torch.full_like(kept, LEAK), (1 - LEAK) / kept + LEAK)
        logprob = drawn[:, 0].double() + factor.log()
        tests.append(TokenTest(name, setting, out - (1 - kept), kept * (1 - kept), out, logprob))
    return tests


def repetition_tests(
    raw: Tensor, log_pi: Tensor, y: Tensor, distinct: Tensor, in_context: Tensor, temperature: float
) -> list[TokenTest]:
    """Return the test of a repetition penalty ρ, and the likelihood at every one of PENALTIES.

    The sampler divides positive logits of tokens that its context holds by ρ and multiplies negative ones by ρ, before
    the temperature (transformers, vLLM). U = d_y − E_π d with d_v = −|z_v|/τ for tokens in the context, otherwise 0.
    `raw` holds the logits z [K, V], `distinct` the tokens of each rollout [K, C], `in_context` whether each had come.
    """
    z, z_y = raw.gather(1, distinct).double(), raw.gather(1, y)[:, 0].double()
    normaliser = z_y / temperature - log_pi.gather(1, y)[:, 0].double()
    pi = torch.where(in_context, torch.exp(z / temperature - normaliser[:, None]), 0.0)
    d = -z.abs() / temperature
    mean, square = (pi * d).sum(-1), (pi * d**2).sum(-1)
    repeated = (in_context & (distinct == y)).any(-1)
    score = torch.where(repeated, -z_y.abs() / temperature, 0.0) - mean
    tests = [TokenTest("repetition", None, score, (square - mean**2).clamp(min=0.0))]
    cube, fourth = (pi * d**3).sum(-1), (pi * d**4).sum(-1)
    tests.append(TokenTest("repetition^3", None, cube - 3 * mean * square + 2 * mean**3))
    fourth += 6 * mean**2 * square - 4 * mean * cube - 3 * mean**4
    tests.append(TokenTest("repetition^4", None, fourth))
    rest = (1 - pi.sum(-1)).clamp(min=0.0)
    for penalty in PENALTIES:
        moved = torch.where(z > 0, z / penalty, z * penalty) / temperature - normaliser[:, None]
        mass = rest + torch.where(in_context, moved.exp(), 0.0).sum(-1)
        changed = torch.where(z_y > 0, z_y / penalty, z_y * penalty)
        logit = torch.where(repeated, changed, z_y) / temperature - normaliser
        tests.append(TokenTest("repetition", penalty, logprob=logit - mass.log()))
    return tests


class LearnedDirection:
    """What earlier tokens taught about how the sampler's output layer differs: a test of other weights.

    a_t = φ_tᵀ D, D = total/(scale + 1) [r, V] from residuals e_y − π of earlier passes, φ_t = (1, a random projection
    of the hidden state). Any lasting difference of logits that is linear in φ shows as Σ_t (a_y − E_π a) > 0.
    """

    def __init__(self, vocabulary: int, width: int, features: int, device: torch.device):
        generator = torch.Generator("cpu").manual_seed(0)
        kept = min(width, features)
        projection = torch.randn(width, kept, generator=generator, device="cpu") / width**0.5
        self.projection = (torch.eye(width, device=device) if kept == width else projection).to(device)
        self.total = torch.zeros(kept + 1, vocabulary, device=device)  # Σ φ (e_y − π)ᵀ
        self.scale = torch.zeros(vocabulary, device=device)  # Σ π(1 − π)


def repeats(
    group: Sequence[int], rows: Sequence[Sequence[int]], difference: Sequence[Sequence[float]]
) -> tuple[int, float, float]:
    """Return how far rollouts agree where they are equal: the same prompt, the same tokens up to this one.

    `difference` is log-probability recorded − scored of every completion token.

    Returns:
        Tokens at prefixes that came more than once; in each class of m equal prefixes, Σ_c ((Σδ)² − Σδ²)/(m − 1); and
        Σ_c Σδ². Their ratio, the intraclass correlation, is 1 if the same prefix always has the same difference, and
        near 0 if every token has one of its own.
    """
    classes: dict[int, list[float]] = defaultdict(list)
    for key, ids, delta in zip(group, rows, difference, strict=True):
        for token, one in zip(ids, delta, strict=True):
            key = hash((key, token))  # Of the whole prefix
            if one == one:
                classes[key].append(one)
    agree, total, n = 0.0, 0.0, 0
    for values in classes.values():
        if len(values) > 1:
            square = sum(x * x for x in values)
            agree += (sum(values) ** 2 - square) / (len(values) - 1)
            total, n = total + square, n + len(values)
    return n, agree, total
