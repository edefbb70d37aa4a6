"""Three sentences, whatever the data are: each short, and each saying what the numbers say."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.figures.conclusion import conclusion_sentences, measure_options, noise_scale_line, signal_sentence
from otb_analysis.statistics import Gram, Interval, Proved, conclude
from otb_analysis.statistics.comparisons.verdicts import Verdict, names
from otb_analysis.types import Label

RLOO: Label = ("rloo", "none")
LABELS: tuple[Label, ...] = (
    RLOO, ("sequence_optimal_loo", "proxy"), ("otb_loo", "exact"), ("none", "none"), ("otb", "proxy"),
)  # fmt: skip
KNOWN = Proved(dict.fromkeys(LABELS[:4], 1.0), frozenset(LABELS[:4]))
TRAINED: tuple[Label, ...] = (("otb", "proxy"), ("group_mean", "none"))
CONFIG = {"sample": {"prompts": 16}, "optimize": {"steps": 61}}


def found(sizes, n_prompts=64, length=3.0, known=KNOWN, own=0.2, seed=0, labels=LABELS):
    rng = np.random.default_rng(seed)
    truth, shared = length * np.eye(12)[0], rng.normal(size=(n_prompts, 12))
    parts = [truth + s * (shared + own * (k > 0) * rng.normal(size=shared.shape)) for k, s in enumerate(sizes)]
    g = np.stack(parts)
    return conclude([Gram(np.einsum("mpd,nqd->mnpq", g, g), labels[: len(sizes)], 4 * n_prompts)], known)


def cases():
    """Every branch, by name."""
    rng = np.random.default_rng(1)
    lost = rng.normal(size=(5, 24, 30))
    lost = lost[:1] + 0.05 * lost
    lost -= lost.mean(axis=1, keepdims=True)
    noise = Gram(np.einsum("mpd,nqd->mnpq", lost, lost), LABELS, 96)
    return {
        "ahead": found([1, 0.7, 1, 0.8, 1]),
        "one ahead": found([1, 0.7, 1, 1], own=0.02),
        "exact ahead": found([1, 1, 0.7, 1], own=0.02),
        "efficiency only": found([1, 0.7, 0.7, 1], known=Proved()),
        "behind": found([1, 1, 1.4, 1.6, 1]),
        "same": found([1, 1, 1, 1], own=0.05),
        "undecided": found([1, 0.91, 0.93, 0.93], n_prompts=32, own=0.4, seed=1),
        "far": replace(found([1, 0.91, 0.93, 0.93], n_prompts=32, own=0.4, seed=1), n_needed=10**6),
        "few": found([1, 0.5], n_prompts=15),
        "single": found([1, 0.5], n_prompts=1),
        "no reference": found([1, 1], labels=LABELS[3:]),
        "alone": found([1]),
        "equal rewards": conclude([Gram(np.zeros((2, 2, 20, 20)), LABELS[:2], 80)]),
        "noise": conclude([noise]),
        "noise, proved": conclude([noise], KNOWN),
    }


CASES = cases()


@pytest.mark.parametrize("trained", [TRAINED, (), LABELS[1:4]])
@pytest.mark.parametrize("name", CASES)
def test_every_conclusion_is_three_sentences_of_at_most_forty_words(name, trained):
    for config in (CONFIG, {}, {"sample": None, "optimize": {"steps": 61}}):
        said = conclusion_sentences(CASES[name], trained, config)
        assert len(said) == 3 and said[2].startswith("Next: ")
        assert all(len(sentence.split()) <= 40 and sentence.endswith(".") for sentence in said)


def test_the_best_is_named_with_its_ratio_interval_and_rollouts_saved():
    best = CASES["ahead"].best
    first, second, third = conclusion_sentences(CASES["ahead"], TRAINED, CONFIG)
    assert best is not None and best.label == ("sequence_optimal_loo", "proxy")
    assert "on 64 prompts; the best that needs no exact norms is sequence_optimal_loo." in first
    shown = f"{best.sf.estimate:.2f} ({best.sf.low:.2f}–{best.sf.high:.2f})"
    assert second.startswith(
        f"Its variance at equal progress (SF) is {shown} times rloo's: for the same noise it needs "
    )
    assert f"at least {100 * (1 - best.sf.high):.0f} % fewer rollouts" in second
    assert "add --estimator.name sequence_optimal_loo to your run's command" in third


def test_what_already_trains_is_kept_and_exact_norms_are_asked_for():
    assert conclusion_sentences(CASES["ahead"], [LABELS[1]])[2].startswith("Next: keep sequence_optimal_loo")
    first, _, third = conclusion_sentences(CASES["exact ahead"], TRAINED)
    assert first.startswith("otb_loo with exact norms beats rloo")
    assert "--estimator.name otb_loo --estimator.energy exact" in third


def test_an_estimator_that_trained_and_fell_behind_is_replaced_by_the_reference():
    said = conclusion_sentences(CASES["behind"], [("none", "none")])
    assert said[0].startswith("No baseline beat rloo on 64 prompts")
    assert "no baseline (none)" in said[1] and "more rollouts" in said[1]
    assert said[2].endswith("instead of no baseline (none): add --estimator.name rloo to your run's command.")
    assert conclusion_sentences(CASES["behind"], TRAINED)[2].startswith("Next: keep what you have (otb, group_mean)")


def test_no_difference_is_said_with_the_widest_interval():
    said = conclusion_sentences(CASES["same"], TRAINED)
    assert said[0].startswith("No difference from rloo is larger than 15 %: none of 3 baselines tested")
    assert "The widest is of" in said[1] and "rollouts" not in said[1]


def test_undecided_says_how_many_prompts_and_which_option():
    case = CASES["undecided"]
    said = conclusion_sentences(case, TRAINED, CONFIG)
    assert said[0].startswith(f"None of {names(case.tested)} baselines tested can be told from rloo on 32 prompts")
    assert "perhaps by chance" in said[1] and "rollouts" not in said[1]
    assert "prompts instead of 32" in said[2] and "by adding --measure.exact.prompts 0" in said[2]
    assert "takes many times more prompts" in conclusion_sentences(CASES["far"], TRAINED, CONFIG)[2]


def test_reasons_for_not_testing_are_the_true_ones():
    assert "15 prompts were measured, and an interval takes 16" in conclusion_sentences(CASES["few"])[0]
    assert "1 prompt was measured" in conclusion_sentences(CASES["single"])[0]
    assert "rloo was not measured" in conclusion_sentences(CASES["no reference"])[0]
    assert "all rewards were equal" in conclusion_sentences(CASES["equal rewards"])[0]
    assert "noise exceeds the signal" in conclusion_sentences(CASES["noise"])[0]


def test_biased_estimators_are_named_as_not_judged_where_noise_exceeds_the_signal():
    said = signal_sentence(CASES["noise, proved"], TRAINED)
    assert said.startswith("Not judged: otb. Their step length must be estimated along ∇J, and on 24 prompts")
    assert signal_sentence(CASES["ahead"]) == ""


def test_command_measures_as_many_prompts_as_asked_for_in_the_runs_own_steps_if_they_suffice():
    def measured(command):
        words = command.split()
        every = int(words[words.index("--measure.exact.every") + 1])
        prompts = int(words[words.index("--sample.prompts") + 1]) if "--sample.prompts" in words else 16
        return prompts * -(-61 // every)

    for needed in (1, 16, 80, 500, 976, 977, 5000):
        assert measured(measure_options(needed, CONFIG)) >= needed
    assert "--sample.prompts" not in measure_options(976, CONFIG)
    assert "--sample.prompts" in measure_options(977, CONFIG)


def test_an_estimator_ahead_in_one_measure_and_behind_in_the_other_is_neither_better_nor_worse():
    lower, share = Interval(0.7, 0.6, 0.8, 64, "sf", 1e-6), Interval(0.6, 0.5, 0.7, 64, "efficiency", 1e-6)
    mixed = Verdict(("otb", "proxy"), lower, share, False, ("sf", "efficiency"))
    assert not mixed.better and not mixed.worse
    found = replace(CASES["ahead"], verdicts=(mixed,), best=None, worst=None)
    said = conclusion_sentences(found, TRAINED, CONFIG)
    assert said[0].startswith("otb differs from rloo on 64 prompts, but nothing that one can train with")
    assert all(len(sentence.split()) <= 40 for sentence in said)


def test_noise_scale_is_one_line_with_equal_scales_named_together():
    rng = np.random.default_rng(0)
    rloo = 3 * np.eye(12)[0] + rng.normal(size=(64, 12))
    g = np.stack([rloo, 0.875 * rloo, rng.normal(size=(64, 12))])
    g[2] -= g[2].mean(axis=0)  # pairs of different prompts then have a negative inner product on average
    labels: tuple[Label, ...] = (RLOO, ("group_mean", "none"), ("otb", "proxy"))
    gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), labels, 256)
    line = noise_scale_line([gram], labels)
    assert line.startswith("Noise scale, the number of prompts at which noise equals signal: rloo and group_mean 1 [")
    assert line.endswith("otb not known, since noise hides the signal.") and "\n" not in line
    assert noise_scale_line([gram], [("value", "none")]) == ""
