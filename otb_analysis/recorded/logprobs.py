"""Recorded log-probabilities against those of the model: placeholders, shifted lists and other bases are refused."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.measurement.table import TokenTable
from otb_analysis.recorded.steps import RecordedStep
from otb_analysis.types import Float

LEAST_TOKENS = 8
"""Policy tokens in which a fault can be seen: of one rollout, or of all of a step together."""
APART, FACTOR = 0.1, 5.0
"""A list is wrong where it is on average so far from the model's, in nats, and so many times nearer otherwise read."""
PLACEHOLDER = -1.0
"""A recorded 0 means certainty; a token that the model gives less than e⁻¹ was not certain to any policy like it."""
BEFORE, BEHIND = "fit the tokens one place before their own", "fit the tokens one place behind their own"
REMEDY = {
    BEFORE: "move the list, entry t is of completion token t",
    BEHIND: "move the list, entry t is of completion token t",
    "are logarithms to base 10": "multiply them by 2.302585",
    "are logarithms to base 2": "multiply them by 0.693147",
}
"""What a list may be instead, and what to do about it."""
Pair = tuple[Float, Float]
"""Recorded and scored log-probabilities of a rollout's policy tokens, in nats [T]."""


def refuse_wrong_logprobs(step: RecordedStep, table: TokenTable) -> None:
    """Refuse recorded log-probabilities, the sampler's or the trainer's, that belong to other tokens or are none.

    Small differences between recorded and scored are not errors: they are the run's mismatch, and stored.

    Raises:
        InputError: A list is off by one, of another base, or holds placeholders; the sentence names the record.
    """
    for name in ("behavior_logprob", "logprob"):
        pairs = list[Pair]()
        for n, record in enumerate(step.records):
            sampled, values = np.flatnonzero(table.mask[n]), record.columns.get(name)
            if values is None or not len(sampled) or len(values) <= sampled[-1]:
                continue
            recorded, scored = values[sampled], table.stats.logprob[n, sampled]
            for t in sampled[(recorded == 0) & (scored < PLACEHOLDER)][:1]:
                raise InputError(
                    f"{record.place}: the log-probability of completion token {t} was recorded as 0, but the model "
                    f"gives {table.stats.logprob[n, t]:.2f}; 0 is a placeholder: mask the token, or leave the list out."
                )
            pairs.append((recorded, scored))
            if fault := fault_of(pairs[-1:]):
                raise InputError(f"{record.place}: its log-probabilities {fault}; {REMEDY[fault]}.")
        if fault := fault_of(pairs):
            raise InputError(
                f"{step.records[0].place} and those of its step: their log-probabilities {fault}; {REMEDY[fault]}."
            )


def fault_of(pairs: Sequence[Pair]) -> str:
    """Return what lists of log-probabilities are instead, a key of `REMEDY`; empty where nothing explains them better.

    Entry t + 1 of a shifted list is that of token t, or entry t − 1 is.
    """
    if sum(len(recorded) for recorded, _ in pairs) < LEAST_TOKENS:
        return ""
    read = {
        "": [recorded - scored for recorded, scored in pairs],
        BEFORE: [recorded[1:] - scored[:-1] for recorded, scored in pairs],
        BEHIND: [recorded[:-1] - scored[1:] for recorded, scored in pairs],
        "are logarithms to base 10": [recorded * np.log(10) - scored for recorded, scored in pairs],
        "are logarithms to base 2": [recorded * np.log(2) - scored for recorded, scored in pairs],
    }
    errors = {name: np.abs(np.concatenate(parts)) for name, parts in read.items()}
    apart = {name: float(error.mean()) for name, error in errors.items() if len(error) >= LEAST_TOKENS // 2}
    best = min(apart, key=lambda name: apart[name])
    return best if apart[""] > APART and apart[best] * FACTOR < apart[""] else ""
