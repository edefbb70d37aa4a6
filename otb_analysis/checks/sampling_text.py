"""The sampling check in plain sentences."""

from otb_analysis.checks.sampling_report import RecordedMismatch, SamplingReport

NAMES = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "repetition": "repetition penalty",
    "noise": "engine mismatch (noise on the logits)",
    "other_weights": "other weights (stale checkpoint, quantisation)",
}
SETTINGS = {
    "temperature": " {:.3f} times the stated one",
    "top_p": " of about {:g}",
    "top_k": " of about {:.0f}",
    "repetition": " of {:.3f}",
    "noise": ", σ = {:.2f}",
}
SHARE = 0.01
"""A share of tokens beyond bfloat16's rounding that is told even without an alarm."""


def sampling_lines(report: SamplingReport) -> list[str]:
    """Return the check in sentences, the verdict first."""
    n = f"{report.n_tokens:,} tokens"
    if report.alarm:
        named = " or ".join(cause_words(cause, report) for cause in report.causes)
        tie = "; cannot be told apart here" if len(report.causes) > 1 else ""
        lines = [f"{n} were not drawn by the stated sampler (z = {report.z:.1f}). Likely cause: {named}{tie}."]
    else:
        lines = [f"{n} fit the model at the stated temperature (no family has p < 0.01 after correction)."]
    temperature = report.families["temperature"]
    if temperature.setting is not None:
        known = f"{temperature.setting:.3f}"
        if temperature.error is not None:
            known += f" ± {1.96 * temperature.error:.3f}"
        else:  # the last one tried
            known += " or " + ("less" if temperature.setting < 1 else "more")
        lines.append(f"Temperature that fits best, if nothing else is wrong: {known} times the stated one.")
    if report.recorded is not None:
        lines += _recorded_lines(report.recorded, report.alarm)
    return lines


def cause_words(cause: str, report: SamplingReport) -> str:
    """Return a cause with the setting that fits best."""
    told = report.recorded
    setting = report.families["probability" if cause == "noise" else cause].setting
    if report.from_recorded and told is not None:
        setting = told.noise if cause == "noise" else told.left.get(cause, (setting, 0.0))[0]
    return NAMES[cause] + (SETTINGS[cause].format(setting) if cause in SETTINGS and setting is not None else "")


def _recorded_lines(told: RecordedMismatch, alarm: bool) -> list[str]:
    lines = [
        f"Recorded log-probabilities differ from the model's by {told.deviation:.2g} nats (root mean square); "
        f"{told.over_float32:.1%} of tokens by more than 0.001 (float32), {told.over_bfloat16:.1%} by more than 0.05 "
        "(bfloat16)."
    ]
    if alarm or told.over_bfloat16 > SHARE:
        better = "the recorded numbers" if told.mean > 0 else "the model"
        (first, _, before), (last, _, behind) = told.by_position[0], told.by_position[-1]
        lines += [
            f"The tokens fit {better} better, by {abs(told.mean):.2g} nats per token.",
            f"The difference is {before:.2g} nats at token {first} and {behind:.2g} from token {last} on.",
        ]
    return lines
