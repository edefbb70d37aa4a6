"""Recorded log-probabilities against those of the model: lists that are shifted, and placeholders, are refused."""

import numpy as np

from otb_analysis.audit.steps import RecordedStep
from otb_analysis.errors import InputError
from otb_analysis.measurement.table import TokenTable
from otb_analysis.types import Float

LEAST_TOKENS = 8
"""Policy tokens in a row that a shift can be seen in."""
APART, FACTOR = 0.1, 5.0
"""A list is shifted where it is on average so far from the model's, in nats, and so many times nearer one token on."""
PLACEHOLDER = -1.0
"""A recorded 0 means certainty; a token that the model gives less than e⁻¹ was not certain to any policy like it."""


def refuse_wrong_logprobs(step: RecordedStep, table: TokenTable) -> None:
    """Refuse recorded log-probabilities that belong to other tokens, or were never measured.

    Small differences between recorded and scored are not errors: they are the run's mismatch, and stored.

    Raises:
        InputError: A list is off by one, or holds placeholders at policy tokens; the sentence names the record.
    """
    recorded, scored = table.behavior_logprob, table.stats.logprob
    for n, record in enumerate(step.records):
        sampled = np.flatnonzero(table.mask[n])
        if not len(sampled) or np.isnan(recorded[n, sampled]).all():
            continue
        placeholder = sampled[(recorded[n, sampled] == 0) & (scored[n, sampled] < PLACEHOLDER)]
        if len(placeholder):
            t = int(placeholder[0])
            raise InputError(
                f"{record.place}: the log-probability of completion token {t} was recorded as 0, but the model gives "
                f"{scored[n, t]:.2f}; 0 is a placeholder: mask the token, or leave the list out."
            )
        if shift := shift_of(recorded[n, sampled], scored[n, sampled]):
            raise InputError(
                f"{record.place}: its log-probabilities fit the tokens one place {'before' if shift > 0 else 'behind'} "
                "their own; move the list, entry t is of completion token t."
            )


def shift_of(recorded: Float, scored: Float) -> int:
    """Return 1 where entry t + 1 of a recorded list [T] is that of token t, −1 where entry t − 1 is, otherwise 0."""
    if len(recorded) < LEAST_TOKENS:
        return 0
    apart = float(np.abs(recorded - scored).mean())
    near = {
        1: float(np.abs(recorded[1:] - scored[:-1]).mean()),
        -1: float(np.abs(recorded[:-1] - scored[1:]).mean()),
    }
    best = min(near, key=lambda shift: near[shift])
    return best if apart > APART and near[best] * FACTOR < apart else 0
