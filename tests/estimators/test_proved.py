"""What a stored configuration proves: every condition of the registry, and silence where it does not say."""

from dataclasses import asdict, replace

import pytest

from otb_analysis.config import EstimatorConfig, ObjectiveConfig, OptimizeConfig, SampleConfig, TrainConfig
from otb_analysis.estimators import ESTIMATORS, proved, proved_in_all, unproved_because

LABELS = (
    ("rloo", "none"), ("none", "none"), ("otb_loo", "proxy"), ("otb_loo", "calibrated"), ("otb", "exact"),
    ("group_mean", "none"), ("batch_mean", "none"), ("batch_mean_loo", "none"), ("value", "none"), ("mine:own", "none"),
)  # fmt: skip
PLAIN = TrainConfig(sample=SampleConfig(prompts=16, group_size=8))


def known(**changes):
    return dict(proved(LABELS, asdict(replace(PLAIN, **changes))).projection)


def test_defaults_of_training_meet_the_conditions():
    assert unproved_because(asdict(TrainConfig())) == ""


def test_recorded_rollouts_prove_nothing_unless_plain_sampling_is_stated():
    config = {"source": {"made_by": "otb score"}, "plain_sampling": False}
    assert "recorded elsewhere" in unproved_because(config) and not proved(LABELS, config).projection
    assert proved(LABELS, config | {"plain_sampling": True}).projection[("rloo", "none")] == 1
    assert unproved_because(config | {"plain_sampling": "yes"})


def test_unbiased_entries_have_one_and_means_of_all_rollouts_are_shorter():
    assert known() == {
        ("rloo", "none"): 1, ("none", "none"): 1, ("otb_loo", "proxy"): 1, ("batch_mean_loo", "none"): 1,
        ("value", "none"): 1, ("group_mean", "none"): 1 - 1 / 8, ("batch_mean", "none"): 1 - 1 / 128,
    }  # fmt: skip


def test_soft_tokens_are_drawn_from_the_policy_that_is_scored():
    assert known(sample=replace(PLAIN.sample, soft=4)) == known() != {}


def test_entries_that_couple_prompts_do_not_stand_for_the_gradient():
    truth = proved(LABELS, asdict(PLAIN)).truth
    assert truth == {("rloo", "none"), ("none", "none"), ("otb_loo", "proxy"), ("value", "none")}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"objective": ObjectiveConfig(staleness=1)}, "older"),
        ({"objective": ObjectiveConfig(epochs=2)}, "more than once"),
        ({"objective": ObjectiveConfig(minibatches=2)}, "more than once"),
        ({"objective": ObjectiveConfig(ratio="ppo")}, "clipped"),
        ({"objective": ObjectiveConfig(ratio="sequence_mask")}, "clipped"),
        ({"objective": ObjectiveConfig(shaping="drop_equal")}, "filtered"),
        ({"objective": ObjectiveConfig(shaping="grpo_lambda")}, "filtered"),
        ({"sample": SampleConfig(engine="vllm")}, "another engine"),
        ({"sample": SampleConfig(filter="dynamic")}, "by their outcome"),
        ({"optimize": OptimizeConfig(precision="bfloat16")}, "half precision"),
    ],
)
def test_a_condition_that_is_not_met_proves_nothing_and_is_named(changes, wrong):
    assert known(**changes) == {}
    assert wrong in unproved_because(asdict(replace(PLAIN, **changes)))


@pytest.mark.parametrize("objective", [ObjectiveConfig(ratio="sequence"), ObjectiveConfig(shaping="overlong")])
def test_full_ratios_and_shaping_by_the_rollout_alone_keep_the_proof(objective):
    assert known(objective=objective) == known()


@pytest.mark.parametrize(
    ("part", "name"), [("objective", "staleness"), ("sample", "engine"), ("optimize", "precision")]
)
def test_a_run_that_does_not_say_proves_nothing(part, name):
    config = asdict(PLAIN)
    del config[part][name]
    assert unproved_because(config) == f"its configuration does not say {part}.{name}"
    assert dict(proved(LABELS, config).projection) == {}
    assert dict(proved(LABELS, {}).projection) == {}


def test_an_unknown_setting_of_sampling_may_cut_or_filter():
    config = asdict(PLAIN)
    config["sample"]["top_p"] = 0.95
    assert unproved_because(config) == "its sampling has the setting top_p"


@pytest.mark.parametrize(
    ("name", "options", "source", "stays"),
    [
        ("otb_loo", {"tail": "zero"}, "proxy", False),
        ("otb_loo", {"tail": "group"}, "proxy", True),
        ("value", {"discount": "0.99"}, "none", False),
        ("value", {"decay": "0.95"}, "none", False),
        ("value", {"decay": "1.0"}, "none", True),
        ("energy_ema_loo", {"decay": "0.5"}, "proxy", True),
    ],
)
def test_options_count_for_the_estimator_that_trains(name, options, source, stays):
    config = asdict(replace(PLAIN, estimator=EstimatorConfig(name=name, options=options)))
    assert ((name, source) in proved([(name, source)], config).projection) == stays
    assert ("otb_loo", "exact") in proved([("otb_loo", "exact")], asdict(PLAIN)).projection


def test_pooled_runs_prove_what_each_of_them_does():
    stale = asdict(replace(PLAIN, objective=ObjectiveConfig(staleness=2)))
    smaller = asdict(replace(PLAIN, sample=SampleConfig(prompts=16, group_size=4)))
    rloo, mean = ("rloo", "none"), ("group_mean", "none")
    assert dict(proved_in_all([([rloo, mean], asdict(PLAIN)), ([mean], stale)]).projection) == {rloo: 1}
    both = proved_in_all([([rloo, mean], asdict(PLAIN)), ([rloo, mean], smaller)])
    assert (dict(both.projection), both.truth) == ({rloo: 1}, {rloo})


def test_entries_that_shrink_are_the_plain_means():
    assert {n: e.shrinks_by for n, e in ESTIMATORS.items() if e.shrinks_by} == {
        "batch_mean": "batch", "group_mean": "group"
    }  # fmt: skip
