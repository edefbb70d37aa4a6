"""What the sampling check adds to a scoring pass: the same rollouts with and without it, by turns."""

from functools import partial

from benchmarks.config import SamplingCostConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import least_seconds, sampled_step, threads
from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.config import SampleConfig
from otb_analysis.measurement.forward import forward_statistics

COLUMNS = {
    "model": "{model}", "V": "{vocabulary:,}", "tokens": "{tokens:,}", "scoring, s": "{scoring:.2f}",
    "with the check, s": "{checked:.2f}", "ratio": "{ratio:.2f}",
}  # fmt: skip


def run(config: SamplingCostConfig) -> Report:
    """Time every model's scoring pass.

    Raises:
        InputError: A model cannot be loaded.
    """
    rows = []
    with threads(config.threads):
        for model in config.models:
            sample = SampleConfig(prompts=config.prompts, group_size=4, max_new_tokens=48)
            trainer, rollouts = sampled_step(sample, model)
            score = partial(forward_statistics, trainer.model, rollouts, 1.0)
            calls = {"scoring": score, "checked": lambda score=score: score(observe=SamplingCheck().observe)}
            seconds = least_seconds(calls, config.repeats)
            row = {"model": model, "vocabulary": trainer.model.config.vocab_size, "tokens": int(rollouts.mask.sum())}
            rows.append(row | seconds | {"ratio": seconds["checked"] / seconds["scoring"]})
    title = "A scoring pass with and without the sampling check"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))
