"""What measuring costs as answers grow, in forward and backward passes of the same rollouts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from benchmarks.config import LongConfig, ProcessesConfig
from benchmarks.engine import model_of
from benchmarks.peer_side import peak
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import group_passes, least_seconds, threads
from otb_analysis.config import (
    AttributionSchedule,
    ContrastSchedule,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
)
from otb_analysis.devices import device_of, products
from otb_analysis.gradients import token_score_norms
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.level import drawn_share
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import token_table
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.tasks import Prompt

BEFORE = 50
"""Tokens of a prompt."""
PASS, GRADIENTS, DRAWN, STEP, NORMS = (
    "forward and backward pass",
    "every estimator's gradient",
    "drawn tokens",
    "a measured step: both",
    "norms of all tokens, of one rollout in {}",
)
PLANS = {
    "exact": Schedule(1), "sampled": SampledSchedule(1), "sketch": SketchSchedule(1, method="hybrid"),
    "attribution": AttributionSchedule(1), "contrast": ContrastSchedule(1),
}  # fmt: skip
"""What is due at every step, by level."""
COLUMNS = {
    "T": "{tokens:,}",
    "what": "{what}",
    "seconds": "{seconds:.2f}",
    "× fwd+bwd": "{passes:.1f}",
    "MiB": lambda row: None if row["memory"] is None else f"{row['memory'] / 2**20:,.0f}",
}


def run(config: LongConfig) -> Report:
    """Time what a step measures of random answers of each length.

    Raises:
        InputError: The model cannot be loaded.
    """
    rows = []
    with threads(config.threads), products(config.precision):
        device = str(device_of())
        model = model_of(config.model, device, "float32")
        for tokens in config.tokens:
            calls = _calls(config, model, random_rollouts(model.config.vocab_size, config, tokens))
            least, memory = least_seconds(calls, config.repeats), {n: peak(c, device) for n, c in calls.items()}
            for name, seconds in least.items():
                whole = seconds * (config.prompts * config.group_size if name == NORMS else 1)
                row = {"tokens": tokens, "what": name.format(config.prompts * config.group_size), "seconds": seconds}
                rows.append(row | {"passes": whole / least[PASS], "memory": memory[name]})
    size = f"{config.prompts} prompts × {config.group_size} rollouts"
    title = f"Measuring answers of T tokens under {config.model}, {config.precision}: {size}"
    plain = (config.model, config.precision) == ("S", "float32")
    name = "long" if plain else f"long_{config.model}_{config.precision}"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, before=BEFORE), name=name)


def random_rollouts(vocabulary: int, config: LongConfig | ProcessesConfig, tokens: int) -> Rollouts:
    """Return rollouts of random tokens, one prompt for each group, with rewards by lot at the last token."""
    random, n = np.random.default_rng(0), config.prompts * config.group_size
    shape = n, BEFORE + tokens
    ids = random.integers(2, vocabulary, shape)
    ids[:, :BEFORE] = ids[:: config.group_size, :BEFORE].repeat(config.group_size, axis=0)
    mask, reward = np.arange(shape[1]) >= BEFORE * np.ones((n, 1)), np.zeros(shape)
    reward[:, -1] = random.integers(2, size=n)
    group, prompts = np.repeat(np.arange(config.prompts), config.group_size), map(str, range(config.prompts))
    return Rollouts(
        tuple(Prompt(p, "", "") for p in prompts), group=group, input_ids=ids, attention_mask=np.ones(shape, bool),
        mask=mask, turn=np.zeros(shape, np.int64), reward=reward, behavior_logprob=np.full(shape, np.nan),
        prompt_length=np.full(n, BEFORE), turns=((),) * n, finish_reason=("length",) * n,
    )  # fmt: skip


def _calls(config: LongConfig, model: PreTrainedModel, rollouts: Rollouts) -> dict[str, Callable[[], object]]:
    table = token_table(rollouts, forward_statistics(model, rollouts, 1.0), None)
    drawn = SampledSchedule(every=1, share=drawn_share(rollouts), by="proxy")
    off = MeasureConfig(exact=Schedule(), subgroups=())
    ids, mask, _ = rollouts.tensors(model.device)

    def measured(**levels: Schedule) -> Callable[[], object]:
        measurer = GradientMeasurer(model, replace(off, **levels), 1.0)

        def measure() -> None:
            # A gap would be a quick one.
            assert not measurer.measure(0, rollouts, table, None, lambda: table.mask / 1.0).gaps

        return measure

    calls = {PASS: group_passes(model, rollouts), GRADIENTS: measured(gradients=Schedule(every=1))}
    calls |= {DRAWN: measured(sampled=drawn), STEP: measured(gradients=Schedule(every=1), sampled=drawn)}
    tokens = int(mask[0].sum())
    if tokens <= config.further_to:
        calls |= {name: measured(**{name: PLANS[name]}) for name in config.further}
    if tokens <= config.norms:
        calls[NORMS] = partial(token_score_norms, model, ids[:1], mask[:1])
    return calls
