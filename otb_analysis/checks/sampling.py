"""The sampling check of a step: sums of every test, collected from the logits of a scoring pass while they exist."""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from otb_analysis.checks.sampling_sums import SUMS
from otb_analysis.checks.sampling_tests import (
    LearnedDirection,
    TokenTest,
    direction_tests,
    noise_tests,
    repeats,
    repetition_tests,
    temperature_tests,
    truncation_tests,
)
from otb_analysis.measurement.forward import PolicyLogits
from otb_analysis.measurement.table import TokenTable
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int

ENTRIES = 1 << 19
"""Entries of the logits, and of the contexts, that are looked at at once: some buffers of 2 MB."""
FEATURES, LEARNED = 128, 1 << 21
"""Most directions of the hidden state in which a difference of weights is learned, and most entries of what is."""
FLOAT32, BFLOAT16 = 1e-3, 0.05
"""Log-probabilities of the same weights in another engine differ by less: in float32, and mostly in bfloat16."""
BY_POSITION = ("temperature", "probability")
"""Score tests that are kept by position."""
Key = tuple[str, float | None, int | None]


def position_bin(token: Int) -> Int:
    """Return the first position of each token's bin: 0, 1, 2, 4, 8 and so on."""
    return np.where(token > 0, 2 ** np.floor(np.log2(np.maximum(token, 1))).astype(np.int64), 0)


class SamplingCheck:
    """Sums of one step, made by `observe` pass by pass; the learned direction goes on from step to step.

    Memory: a few tiles of logits, and at most 8 MB for the learned direction.
    """

    def __init__(self) -> None:
        self._sums: dict[Key, dict[str, float]] = {}
        self._learned: LearnedDirection | None = None

    @torch.no_grad()
    def observe(self, part: PolicyLogits) -> None:
        """Add the policy tokens of a forward pass."""
        vocabulary = part.logits.shape[1]
        if self._learned is None:
            kept = max(1, min(FEATURES, LEARNED // vocabulary))
            self._learned = LearnedDirection(vocabulary, part.hidden.shape[1], kept, part.logits.device)
        context, direction = _Context.from_rollouts(part.rollouts, part.logits.device), self._learned.direction()
        recorded = torch.as_tensor(part.rollouts.by_token(part.rollouts.behavior_logprob), device=part.logits.device)
        features = self._learned.features(part.hidden)
        residual = torch.zeros_like(self._learned.total)
        scale = torch.zeros_like(self._learned.scale)
        size = max(1, ENTRIES // max(vocabulary, context.ids.shape[1]))
        for rows in torch.arange(len(part.targets), device=part.logits.device).split(size):
            raw, y = part.logits[rows].float(), part.targets[rows, None]
            log_pi = (raw / part.temperature).log_softmax(-1)
            row, token = part.row[rows], part.token[rows]
            pi = log_pi.exp()
            statistics = {"temperature": log_pi, "probability": pi, "other_weights": features[rows] @ direction}
            tests = direction_tests(pi, statistics, y)
            tests += temperature_tests(log_pi, y) + noise_tests(log_pi, y) + truncation_tests(log_pi, y)
            tests += context.repetition(raw, log_pi, y, row, token, part.temperature)
            logprob = log_pi.gather(1, y)[:, 0].double()
            self._add(tests, logprob, recorded[row, token], token.cpu().numpy())
            scale += (pi * (1 - pi)).sum(0)
            residual -= features[rows].T @ pi
            residual.index_add_(1, y[:, 0], features[rows].T)
        self._learned.learn(residual, scale)

    def _add(self, tests: list[TokenTest], logprob: Tensor, recorded: Tensor, token: Int) -> None:
        known = ~torch.isnan(recorded)
        bins = position_bin(token)
        for test in tests:
            columns = {
                "score": test.score,
                "variance": test.variance,
                "observed": test.observed,
                "gain": None if test.logprob is None else test.logprob - logprob,
                "residual_sq": None
                if test.logprob is None or not bool(known.any())
                else torch.where(known, recorded - test.logprob, 0.0).square(),
            }
            whole = {name: x.cpu().numpy() for name, x in columns.items() if x is not None}
            if test.test in BY_POSITION and test.parameter is None:
                for start in np.unique(bins).tolist():
                    self._sum((test.test, None, start), whole, bins == start)
            else:
                self._sum((test.test, test.parameter, None), whole, np.ones(len(token), bool))

    def _sum(self, key: Key, columns: dict[str, Float], rows: Bool) -> None:
        sums = self._sums.setdefault(key, defaultdict(float))
        sums["n_tokens"] += int(rows.sum())
        for name, values in columns.items():
            sums[name] += float(values[rows].sum())

    def rows(self, rollouts: Rollouts, table: TokenTable) -> dict[str, object]:
        """Return the step's rows of the table `sampling`, and begin anew."""
        self._recorded(rollouts, table)
        keys, sums = list(self._sums), list(self._sums.values())
        self._sums = {}
        columns: dict[str, object] = {
            "test": [test for test, _, _ in keys],
            "parameter": [parameter for _, parameter, _ in keys],
            "position": [position for _, _, position in keys],
        }
        return columns | {name: [one.get(name) for one in sums] for name in SUMS}

    def _recorded(self, rollouts: Rollouts, table: TokenTable) -> None:
        """Add what the sampler's own log-probabilities say, where it recorded them: δ = recorded − scored.

        `recorded`, by position: score and gain Σδ, variance Σ‖e_y − π‖² (logit noise makes Var δ σ² times it), observed
        Σ1[|δ| > 0.05], residual_sq Σδ². `beyond_rounding` counts |δ| > 0.001. `repeated`: see `repeats`.
        """
        inside = table.mask & ~np.isnan(table.behavior_logprob)
        if not inside.any():
            return
        delta = np.where(inside, table.behavior_logprob - table.stats.logprob, np.nan)
        n, t = np.nonzero(inside)
        d, bins = delta[n, t], position_bin(t)
        columns = {
            "score": d, "variance": table.stats.energy[n, t], "observed": (np.abs(d) > BFLOAT16).astype(float),
            "gain": d, "residual_sq": d**2,
        }  # fmt: skip
        for start in np.unique(bins).tolist():
            self._sum(("recorded", None, start), columns, bins == start)
        over = {"observed": (np.abs(d) > FLOAT32).astype(float)}
        self._sum(("beyond_rounding", FLOAT32, None), over, np.ones(len(d), bool))
        ids = [row[present].tolist() for row, present in zip(table.token_id, table.present, strict=True)]
        values = [row[present].tolist() for row, present in zip(delta, table.present, strict=True)]
        alike = repeats(table.group.tolist(), ids, values)
        self._sums[("repeated", None, None)] = {
            "n_tokens": alike.n_tokens, "score": alike.agree, "variance": alike.total
        }  # fmt: skip


class _Context:
    """The distinct tokens of each rollout, prompt included, and where each comes first."""

    def __init__(self, ids: Tensor, column: Tensor, start: Tensor):
        self.ids, self.column, self.start = ids, column, start

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts, device: torch.device) -> "_Context":
        distinct = [np.unique(ids, return_index=True) for ids in rollouts.input_ids]
        shape = len(distinct), max(len(ids) for ids, _ in distinct)
        ids, column = np.zeros(shape, np.int64), np.full(shape, rollouts.input_ids.shape[1])
        for n, (found, first) in enumerate(distinct):
            ids[n, : len(found)], column[n, : len(found)] = found, first
        return cls(*(torch.as_tensor(x, device=device) for x in (ids, column, rollouts.prompt_length)))

    def repetition(
        self, raw: Tensor, log_pi: Tensor, y: Tensor, row: Tensor, token: Tensor, temperature: float
    ) -> list[TokenTest]:
        """Return the tests of a repetition penalty for tokens of one tile."""
        ids = self.ids[row]
        in_context = self.column[row] < (self.start[row] + token)[:, None]
        same = in_context & (ids == y)
        came = torch.where(same.any(-1), 0.0, -1.0).double()
        own = raw.gather(1, y)[:, 0].double()
        normaliser = own / temperature - log_pi.gather(1, y)[:, 0].double()
        return repetition_tests(raw.gather(1, ids), in_context, torch.stack([came, own], -1), normaliser, temperature)
