import json
from dataclasses import asdict, replace

from otb_analysis.answers.pairs import left_out_note
from otb_analysis.config import EstimatorConfig, ObjectiveConfig, TrainConfig
from otb_analysis.figures.runs import config_differences, flatten


def test_configuration_is_flattened_with_dots():
    assert flatten({"a": 1, "task": {"name": "x", "n": {"m": 2}}}) == {"a": 1, "task.name": "x", "task.n.m": 2}


def test_only_settings_that_differ_are_listed_and_missing_ones_show_a_dash():
    found = config_differences({"x": {"seed": 0, "lr": 1e-4}, "y": {"seed": 1, "lr": 1e-4, "extra": True}})
    assert (found.left_out, left_out_note(found)) == (0, "")
    assert found.table.to_dict("records") == [
        {"setting": "extra", "x": "–", "y": "True"},
        {"setting": "seed", "x": "0", "y": "1"},
    ]


def test_equal_configurations_have_no_differences():
    assert config_differences({"x": {"seed": 0}, "y": {"seed": 0}}).table.empty


def stored(**changes):
    """A configuration as run.json holds it."""
    return json.loads(json.dumps(asdict(replace(TrainConfig(), **changes)), default=str))


def test_settings_that_an_older_run_does_not_know_are_counted_unless_another_run_changed_them():
    older = {"seed": 0, "sample": {"prompts": 16, "group_size": 8}}
    newer = stored(seed=1, objective=ObjectiveConfig(epochs=2), estimator=EstimatorConfig(options={"tail": "group"}))
    found = config_differences({"older": older, "newer": newer})
    assert found.table.to_dict("records") == [
        {"setting": "estimator.options.tail", "older": "–", "newer": "group"},
        {"setting": "objective.epochs", "older": "–", "newer": "2"},
        {"setting": "seed", "older": "0", "newer": "1"},
    ]
    # all but run, seed, prompts, group_size, and the two listed above
    assert found.left_out == len(flatten(newer)) - 6
    note = left_out_note(found)
    assert note.startswith("Left out") and note.endswith(f": {found.left_out} settings.")


def test_setting_left_out_where_one_run_lacks_it_is_listed_where_the_others_disagree():
    changed = stored(objective=ObjectiveConfig(epochs=2))
    older = {name: value for name, value in stored().items() if name != "objective"}
    found = config_differences({"older": older, "plain": stored(), "changed": changed})
    assert found.table.to_dict("records") == [
        {"setting": "objective.epochs", "older": "–", "plain": "1", "changed": "2"},
    ]
    assert config_differences({"plain": stored(), "same": stored()}).left_out == 0


def test_one_setting_left_out_is_one():
    older = {name: value for name, value in stored().items() if name != "trackers"}
    assert left_out_note(config_differences({"older": older, "newer": stored()})).endswith(": 1 setting.")
    assert left_out_note(config_differences({"older": older, "same": older})) == ""
