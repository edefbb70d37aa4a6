"""The slow, obvious engine: ordinary reverse-mode autograd, one backward pass per row of weights.

`norms_of` is the loop that all share: measure one rollout's scores, write their norms to their places.
Every faster engine is compared with this one. Rollouts run one at a time without padding; a forward graph is kept while
its backward passes run. Gradients are formed in the model's dtype, squared norms are summed in float64.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, free_bytes
from otb_analysis.gradients.exact.gram import GRADIENT_BYTES, Stretch, gram_matrix, norm_sq_of, refuse_many, stretches
from otb_analysis.gradients.exact.verdicts import Verdicts, graph_bytes
from otb_analysis.phases import counted
from otb_analysis.types import Bool, Float, Int

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """Which norms of a batch's scores are wanted."""

    tokens: Bool  # Tokens whose ‖s_t‖² are [N, L]
    weights: Float  # Rows of weights whose ‖Σ_t w_t s_t‖² are [N, M, L]
    path: bool = False  # Whether ‖Σ_{j≤t} s_j‖² are too; then `tokens` are all that were sampled

    @classmethod
    def of_tokens(cls, batch: ScoreBatch, path: bool = False) -> "Asked":
        """Ask for every sampled token of a batch, and for no sums."""
        return cls(batch.mask, np.zeros((batch.shape[0], 0, batch.shape[1])), path)


@dataclass(frozen=True)
class Mix:
    """C weighted scores Σ_k weights[c, k] s_k of the sampled tokens `span`; weights None for the tokens' own scores."""

    weights: Tensor | None
    span: slice

    def matrix(self, token_signals: Tensor) -> Tensor:
        """Weights [C, |span|], like the signals of all tokens."""
        if self.weights is None:
            return torch.eye(len(token_signals[self.span]), device=token_signals.device).to(token_signals)
        return self.weights.to(token_signals)


@dataclass(frozen=True)
class Norms:
    """What an engine found, zero where nothing was asked."""

    logprob: Float  # In nats [N, L]
    norm_sq: Float  # [N, L]
    path_norm_sq: Float  # [N, L]
    weighted: Float  # [N, M]


def norms_of(
    batch: ScoreBatch, asked: Asked, measure: Callable[[Rollout, int, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
) -> Norms:
    """Measure every rollout of which anything is asked.

    Args:
        measure: What of a rollout, the first of its K sampled tokens to be measured (K for none) and R rows of weights
            [R, K], float64 → log-probabilities, squared score norms and squared path norms from that token on, each
            [≤ K], and squared norms of the weighted sums [R].
    """
    logprob, norm_sq, path_norm_sq = by_token = [np.zeros(batch.shape) for _ in range(3)]
    weighted = np.zeros(asked.weights.shape[:2])
    for rollout in counted(batch.rollouts, "rollout"):
        wanted = np.flatnonzero(asked.tokens[rollout.row, rollout.columns])
        rows = asked.weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if not len(wanted) and not len(active):
            continue
        # Tokens that another rollout stands for come first: their texts are the beginning of this one's.
        first = int(wanted[0]) if len(wanted) else len(rollout.columns)
        *measured, of_rows = measure(rollout, first, torch.from_numpy(rows[active]))
        for result, values in zip(by_token, measured, strict=True):
            result[rollout.row, rollout.columns[first:]] = values.detach().double().cpu().numpy()
        weighted[rollout.row, active] = of_rows.cpu().numpy()
    return Norms(logprob, norm_sq, path_norm_sq, weighted)


NAME = "reference"
BLOCK = 16
"""Tokens that share one forward graph on their common prefix: what comes after a token has no part in its score, and
running it anyway costs more than the extra forward passes (1.5 times as long for 46 tokens of a small model)."""

_GRAPHS = Verdicts[int]()


def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """Squared norm of every token's score by one `torch.autograd.grad` per token, and of rows of weights likewise.

    For path norms the running sum Σ_{j≤t} s_j is kept in float64.
    """

    def measure(rollout: Rollout, first: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_rows = list[float]()
        if len(rows):
            values = sampled_logprobs(batch, (rollout,))
            of_rows = [norm_sq_of(_weighted_score(values, row.to(values), batch.scope.parameters)) for row in rows]
            del values  # its graph, before others are made
        # A path sum adds many scores that nearly cancel; float32 would drift.
        running = [torch.zeros_like(p, dtype=torch.float64) for p in batch.scope.parameters] if asked.path else []
        measured = list[tuple[float, float, float]]()
        for logprob, score in _scores(batch, rollout, first):
            for total, part in zip(running, score if asked.path else (), strict=True):
                total.add_(part)
            measured.append((logprob, norm_sq_of(score), norm_sq_of(running) if asked.path else 0.0))
        exact = {"dtype": torch.float64, "device": "cpu"}
        logprob, norms, path_norms = torch.tensor(measured, **exact).reshape(-1, 3).T
        return logprob, norms, path_norms, torch.tensor(of_rows, **exact)

    return norms_of(batch, asked, measure)


def needed_bytes(batch: ScoreBatch, path: bool) -> int:
    """What measuring the longest rollout takes, about: a graph and as much on the way back, gradients, path sums."""
    if not batch.rollouts:
        return 0
    gradient = sum(p.numel() * p.element_size() for p in batch.scope.parameters)
    sums = sum(8 * p.numel() for p in batch.scope.parameters) if path else 0
    return 2 * (pass_bytes(batch) + gradient) + sums


def graph_per_position(batch: ScoreBatch) -> int:
    """What the graph of a forward pass keeps per position; 0 where a model reads soft tokens, which has no probe."""
    return 0 if batch.soft is not None else _GRAPHS.get(batch, lambda: graph_bytes(batch))


def pass_bytes(batch: ScoreBatch) -> int:
    """The graph of one pass over the longest rollout, with its logits and attention."""
    longest = max(batch.rollouts, key=lambda r: r.length)
    length, config = longest.length, getattr(batch.model, "config", None)
    size = batch.scope.parameters[0].element_size()
    logits = 3 * len(longest.columns) * int(getattr(config, "vocab_size", 0)) * size
    # The plain kernel keeps scores and weights of all pairs of positions.
    heads = getattr(config, "num_attention_heads", 0) * getattr(config, "num_hidden_layers", 0)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return graph_per_position(batch) * length + logits + (3 * heads * length**2 * size if eager else 0)


def group_gradient_gram(batch: ScoreBatch, weights: Float, group: Int) -> Float:
    """Gram matrix [M, M, P, P] by one forward per prompt and one backward per row that is not all zero there.

    Where the gradients do not fit in `GRADIENT_BYTES` together, the parameters are taken a stretch at a time, with a
    backward pass as far as that stretch for every row; the products of the stretches add up.
    """
    prompts = [prompt_weights(batch, weights, group == p) for p in np.unique(group)]
    active = [np.flatnonzero(rows.any(-1)) for _, rows in prompts]
    gram = np.zeros((weights.shape[1], weights.shape[1], len(prompts), len(prompts)))
    count = sum(len(rows) for rows in active)
    if count:
        refuse_many(count)
        rounds = stretches(batch.scope.parameters, count)
        if len(rounds) > 1:
            _log.warning(
                "%d gradients exceed %.3g GiB, so their Gram matrix takes %d rounds of backward passes; "
                "gradient_sketch estimates it in one.",
                count,
                GRADIENT_BYTES / 2**30,
                len(rounds),
            )
        total = sum(
            gram_matrix(
                [
                    gradient
                    for (rollouts, rows), used in zip(prompts, active, strict=True)
                    for gradient in _stretch_gradients(batch, rollouts, rows[used], stretch)
                ]
            )
            for stretch in rounds
        )
        m, p = np.concatenate(active), np.repeat(np.arange(len(prompts)), [len(rows) for rows in active])
        gram[m[:, None], m[None, :], p[:, None], p[None, :]] = total
    return gram


def prompt_weights(batch: ScoreBatch, weights: Float, member: Bool) -> tuple[tuple[Rollout, ...], Float]:
    """One prompt's rollouts that hold a sampled token, and the weights of their tokens side by side [M, Σ K]."""
    rollouts = tuple(r for r in batch.rollouts if member[r.row])
    rows = [weights[r.row][:, r.columns] for r in rollouts]
    return rollouts, np.concatenate([np.zeros((weights.shape[1], 0)), *rows], axis=1)


def _stretch_gradients(
    batch: ScoreBatch, rollouts: tuple[Rollout, ...], rows: Float, stretch: Stretch
) -> list[list[Tensor]]:
    """The gradients of a prompt's rows of weights, on a stretch of the parameters only."""
    parameters, total, start = [batch.scope.parameters[index] for index, _ in stretch], list[list[Tensor]](), 0
    if len(rows) == 0:
        return total
    # As many rollouts at a time as fit, with their graph and as much on the way back.
    each = 2 * pass_bytes(replace(batch, rollouts=rollouts))
    size = max(1, free_bytes(parameters[0].device) // max(each, 1))
    for k in range(0, len(rollouts), size):
        values, gradients = sampled_logprobs(batch, rollouts[k : k + size]), list[list[Tensor]]()
        for row in torch.from_numpy(rows[:, start : (start := start + len(values))]):
            score = _weighted_score(values, row.to(values), parameters)
            # A copy of a part lets go of the whole gradient; a whole one is kept as it is.
            flat = [(part.flatten(), span) for part, (_, span) in zip(score, stretch, strict=True)]
            gradients.append([x if span.stop - span.start == len(x) else x[span].clone() for x, span in flat])
        # Not in place: two parameters may have been given one tensor.
        pairs = zip(total, gradients, strict=True)
        total = [[x + y for x, y in zip(*pair, strict=True)] for pair in pairs] if k else gradients
        del values
    return total


def token_alignments(batch: ScoreBatch, direction: Sequence[Tensor]) -> Float:
    """s_{n,t}·direction [N, L] by one `torch.autograd.grad` per token: the slow twin of the attribution."""
    result = np.zeros(batch.shape)
    for rollout in batch.rollouts:
        for column, (_, score) in zip(rollout.columns, _scores(batch, rollout), strict=True):
            dots = [(s.double() * d.double()).sum() for s, d in zip(score, direction, strict=True)]
            result[rollout.row, column] = float(torch.stack(dots).sum())
    return result


def _scores(batch: ScoreBatch, rollout: Rollout, first: int = 0) -> Iterator[tuple[float, list[Tensor]]]:
    """Log-probability and score of every sampled token from the `first` on."""
    for block in rollout.blocks(BLOCK, first):
        values = sampled_logprobs(batch, (block,))
        units = torch.eye(len(values), device=values.device).to(values)
        for value, unit in zip(values.detach().double().tolist(), units, strict=True):
            yield value, _weighted_score(values, unit, batch.scope.parameters)
        del values  # or two graphs would be held while the next one is made


def _weighted_score(logprob: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Σ_t weights[t] ∇ logprob[t], one tensor per parameter; the graph is kept for the next row."""
    # `grad` instead of `backward`: the caller's `.grad` stays as it was.
    grads = torch.autograd.grad(logprob, parameters, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
