"""What decisions say: every case in sentences of at most 40 words, with commands that can be run."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers.measured import decision_lines, interval_words, measure_options
from otb_analysis.statistics import REFERENCE, Comparison, Gram, Interval, Proved, decide

CONFIG = {"sample": {"prompts": 16}, "optimize": {"steps": 61}}
RECORDED = {"source": {"path": "r.jsonl"}, "model": "my model", "rollouts": "r.jsonl"}
PATH = "/runs/a run"
LOO, EXACT, NONE, OTB = ("sequence_optimal_loo", "proxy"), ("otb_loo", "exact"), ("none", "none"), ("otb", "proxy")
LABELS = (REFERENCE, LOO, EXACT, NONE, OTB)
KNOWN = Proved(dict.fromkeys(LABELS[:4], 1.0), frozenset(LABELS[:4]))
SAME = 1 / np.sqrt(1 + 0.2**2)


@pytest.fixture(scope="module")
def cases(gram):
    """Every branch, by name."""

    def found(sizes, n_prompts=64, known=KNOWN, **law):
        return decide([gram(sizes, n_prompts, **law)], known=known)

    lost = np.random.default_rng(1).normal(size=(2, 24, 30))
    lost[1] = lost[0] + 0.05 * lost[1]
    lost -= lost.mean(axis=1, keepdims=True)
    hidden = Gram(np.einsum("mpd,nqd->mnpq", lost, lost), (REFERENCE, OTB), 96)
    close = found([SAME, 0.97, 1, 1], n_prompts=32, own=0.5, seed=1)
    within = found([1, *[0.999] * 3], own=0.03)
    lost_one = Comparison(OTB, "efficiency", None, None)
    return {
        "better": found([1, 0.7, 1, 0.8, 1]),
        "better, exact": found([1, 1, 0.7, 1]),
        "better, by efficiency": found([1, 0.7], known=Proved()),
        "none better": close,
        "far": replace(close, n_needed=10**6),
        "suffice": replace(close, n_needed=20),
        "worse": found([1, 1.4, 1.5, 1.6]),
        "within": within,
        "within, one hidden": replace(within, comparisons=(*within.comparisons, lost_one), looked_at=4, signal=True),
        "within, one worse": found([1, 0.999, 0.999, 1.6], own=0.03),
        "noise": replace(decide([hidden]), n_needed=100),
        "noise, far": decide([hidden]),
        "few prompts": found([1, 0.5], n_prompts=15),
        "one prompt": found([1, 0.5], n_prompts=1),
        "one prompt a step": decide([gram([1, 0.5], n_prompts=1, seed=step) for step in range(40)], known=KNOWN),
        "alone": found([1]),
        "equal rewards": decide([Gram(np.zeros((2, 2, 20, 20)), LABELS[:2], 80)]),
        "no reference": decide([gram([1, 1], labels=(OTB, ("group_mean", "none")))]),
    }


def said(case, trained=(REFERENCE,), config=CONFIG, beside=None):
    return decision_lines(case, beside, trained, config, PATH)


def test_every_case_is_a_few_sentences_of_at_most_forty_words(cases):
    for name, case in cases.items():
        for trained in ((), (OTB, ("group_mean", "none")), LABELS[1:4]):
            for config in (CONFIG, {}, RECORDED, {"sample": None, "optimize": {"steps": 61}}):
                for beside in (None, cases["better"], cases["none better"], cases["noise"]):
                    lines = said(case, trained, config, beside)
                    assert 1 <= len(lines) <= 5
                    for line in lines:
                        prose = line.split(": otb ")[0].split("Next: otb ")[0]
                        assert len(prose.split()) <= 40, (name, line)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("better", ("Train with sequence_optimal_loo", "all 4 baselines")),
        ("better, exact", ("Train with otb_loo with exact norms", "64 prompts")),
        ("better, by efficiency", ("Train with sequence_optimal_loo", "(efficiency)")),
        ("none better", ("Keep rloo", "none of 3", "Nearest is", "perhaps by chance")),
        ("far", ("many times more prompts than 32",)),
        ("suffice", ("32 prompts suffice",)),
        ("worse", ("Keep rloo", "all 3 baselines are shown to be worse")),
        ("within", ("Keep rloo", "no difference from rloo is larger than 10 %")),
        (
            "within, one hidden",
            ("none that can be judged is better than rloo by more than 10 %", "all 4 together; 1 cannot be judged"),
        ),
        ("within, one worse", ("better than rloo by more than 10 %", "1 shown to be worse")),
        ("noise", ("Keep rloo", "Noise hides the true gradient", "About 100 prompts would tell the true gradient")),
        ("noise, far", ("Noise hides the true gradient", "many times more prompts than 24")),
        ("few prompts", ("15 prompts were measured", "takes 16", "About 16 prompts would give")),
        ("one prompt", ("1 prompt was measured",)),
        ("one prompt a step", ("on 40 prompts", "have one prompt", "several prompts at each step: otb train")),
        ("alone", ("only rloo and multiples",)),
        ("equal rewards", ("all rewards were equal", "teach nothing")),
        ("no reference", ("rloo, which", "two rollouts of a prompt", "--sample.group_size")),
    ],
)
def test_each_case_says_what_it_is(cases, name, words):
    text = " ".join(said(cases[name]))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("sizes", "law", "words"),
    [
        ([1, 0.7], {}, ("1 of 1 is shown", "64 prompts.")),
        ([1, 1.4], {}, ("the other baseline is shown to be worse than rloo on 64 prompts.",)),
        ([1, 0.9], {"n_prompts": 32, "own": 0.5, "seed": 1}, ("the other baseline is not shown to be better",)),
    ],
)
def test_one_baseline_is_not_all_of_them(gram, sizes, law, words):
    text = " ".join(said(decide([gram(sizes, **{"n_prompts": 64} | law)], known=KNOWN)))
    assert all(word in text for word in words) and "together" not in text and "1 baselines" not in text, text


def test_the_interval_of_a_sentence_is_the_one_that_holds_for_all(cases):
    case = cases["better"]
    first = said(case)[0]
    assert interval_words(case.best.together) in first and interval_words(case.best.one_look) not in first
    assert f"{len(case.better)} of 4 are shown to be better than rloo" in said(case)[1]
    assert interval_words(Interval(0.97, 0.941, 0.9996, 20, "")) == "0.97 (0.9410–0.9996)"


def test_what_already_trains_is_kept_and_rloo_is_said_beside_it(cases):
    assert said(cases["better"], [LOO])[0].startswith("Keep sequence_optimal_loo")
    lines = said(cases["none better"], [OTB], beside=cases["better"])
    assert lines[0].startswith("Keep otb")
    # The best against rloo is no advice: it need not be better than the one that trained.
    for name, stands in (("none better", "worse than"), ("within", "not shown to beat"), ("better", "better than")):
        lines = said(cases[name], [OTB], beside=cases["better"])
        (line,) = (line for line in lines if "the best is sequence_optimal_loo" in line)
        assert "rloo, which did not train" in line and f"{stands} what trained" in line
    assert "none of 3" in " ".join(said(cases["better"], beside=cases["none better"]))


def test_nothing_is_kept_where_it_is_not_known_what_trained_nor_what_is_shown_to_be_worse(cases):
    assert said(cases["none better"], ())[0].startswith("None of 3 baselines is shown to be better than rloo")
    case = cases["worse"]
    worse = case.worse[0].label
    assert said(case, [REFERENCE, worse])[0].startswith("Keep rloo: all 3 baselines are shown to be worse")


def test_of_several_that_trained_each_is_said_to_be_better_worse_or_open(cases):
    lines = said(cases["better"], [REFERENCE, OTB])
    assert lines[0].startswith("Train with sequence_optimal_loo")
    assert "Of what trained, otb is open against rloo." in lines
    assert not any("Of what trained" in line for line in said(cases["better"], [LOO]))


def test_nothing_is_said_of_all_where_one_has_no_interval_that_holds_with_the_others(cases):
    for name, claim in (("worse", "shown to be worse than"), ("within", "no difference from")):
        first, *rest = cases[name].comparisons
        case = replace(cases[name], comparisons=(replace(first, together=None), *rest))
        assert claim in said(cases[name])[0] and claim not in " ".join(said(case)), name
        assert said(case)[0].startswith("Keep rloo: none of 3 baselines is shown to be better"), name


def test_without_a_configuration_no_command_repeats_the_run(cases):
    assert command(said(cases["none better"], config={})[-1])[:3] == ["otb", "train", "--measure.gradients.prompts"]


def command(line):
    return shlex.split(line[line.index("otb ") :].split(";")[0])


def test_commands_are_words_that_run(cases):
    train = command(said(cases["better, exact"])[-1])
    assert train[:6] == ["otb", "train", "--config", f"{PATH}/run.json", "--run", "a run-otb_loo"]
    assert train[6:] == ["--estimator.name", "otb_loo", "--estimator.energy", "exact"]
    measure = command(said(cases["none better"])[-1])
    assert measure[:6] == ["otb", "train", "--config", f"{PATH}/run.json", "--run", "a run-more"]
    assert measure[6:8] == ["--measure.gradients.prompts", "0"] and "--measure.gradients.every" in measure
    audit = command(said(cases["none better"], config=RECORDED)[-1])
    assert audit == ["otb", "audit", "--model", "my model", "--rollouts", "r.jsonl", "--go"]
    assert "in your trainer" in said(cases["better"], config=RECORDED)[-1]


def test_a_command_measures_as_many_prompts_as_asked_for_in_the_runs_own_steps_if_they_suffice():
    def measured(words):
        words = words.split()
        every = int(words[words.index("--measure.gradients.every") + 1])
        steps = int(words[words.index("--optimize.steps") + 1]) if "--optimize.steps" in words else 61
        return 16 * -(-steps // every)

    for needed in (1, 16, 80, 500, 976, 977, 5000):
        assert measured(measure_options(needed, CONFIG)) >= needed
    assert "--optimize.steps" not in measure_options(976, CONFIG)
    assert "--optimize.steps 62" in measure_options(977, CONFIG)


@pytest.mark.parametrize("made_by", ["OTBMonitor", "OTBGRPOTrainer"])
def test_a_training_of_trl_is_measured_while_it_trains_and_not_audited(cases, made_by):
    config = CONFIG | {"source": {"made_by": made_by, "format": "trl"}, "model": "m"}
    text = " ".join(said(cases["few prompts"], config=config))
    # 15 of about 20 prompts were measured; one batch in ten measures 16 more.
    assert "train 10 more batches with measure=MeasureConfig(exact=Schedule()," in text and "otb " not in text
    text = " ".join(said(replace(cases["few prompts"], n_needed=100), config=config))
    assert "train 60 more batches" in text  # 85 prompts are missing
    config["sample"] = dict(CONFIG["sample"]) | {"prompts": 2}
    text = " ".join(said(replace(cases["few prompts"], n_needed=100), config=config))
    assert "train 430 more batches" in text  # a batch in ten, of 2 prompts
    assert "otb audit --model" in " ".join(said(cases["few prompts"], config=RECORDED))


def test_more_steps_of_one_prompt_are_not_advised(cases):
    for sample, options in (({"prompts": 1}, ["0", "--sample.prompts", "16"]), ({"prompts": 8}, ["0"])):
        line = said(cases["one prompt a step"], config={"sample": sample, "optimize": {"steps": 40}})[-1]
        assert command(line)[6:] == ["--measure.gradients.prompts", *options]
    monitored = {"source": {"made_by": "OTBMonitor"}, "sample": {"prompts": 1}}
    assert "more prompts in a batch" in said(cases["one prompt a step"], config=monitored)[-1]
    assert "record several of a step, then otb audit" in said(cases["one prompt a step"], config=RECORDED)[-1]
