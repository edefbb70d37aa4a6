from otb_analysis.answers.pairs import pairing_note
from otb_analysis.figures.runs import config_differences, default_pairing, group_keys, pair_groups, pair_runs


def config(name: str, seed: int, rate: float = 1e-4, **more: object) -> dict[str, object]:
    return {
        "run": f"{name}-{seed}",
        "seed": seed,
        "estimator": {"name": name},
        "optimize": {"learning_rate": rate},
        **more,
    }


SWEEP = {f"{name}-{seed}": config(name, seed) for name in ("rloo", "otb") for seed in (0, 1, 2)}


def test_groups_are_paired_by_seed():
    found = pair_groups(SWEEP, "estimator.name", "rloo", "otb")
    assert found.pairs == (("rloo-0", "otb-0"), ("rloo-1", "otb-1"), ("rloo-2", "otb-2"))
    assert (found.by, found.also, found.left_out) == ("seed", (), ())
    assert pairing_note(found) == "Paired by seed: 3 pairs, Student's 95 % intervals over seeds."


def test_a_seed_without_partner_is_left_out_and_named():
    some = {name: one for name, one in SWEEP.items() if name != "otb-1"}
    found = pair_groups(some, "estimator.name", "rloo", "otb")
    assert found.pairs == (("rloo-0", "otb-0"), ("rloo-2", "otb-2"))
    assert found.left_out == ("rloo-1",) and pairing_note(found).endswith("Without a partner of the same seed: rloo-1.")


def test_the_partner_differs_in_the_fewest_other_settings_and_they_are_named():
    several = {"a": config("rloo", 0), "far": config("otb", 0, 1e-3), "near": config("otb", 0)}
    assert pair_groups(several, "estimator.name", "rloo", "otb").pairs == (("a", "near"),)
    only_far = {"a": config("rloo", 0), "far": config("otb", 0, 1e-3)}
    found = pair_groups(only_far, "estimator.name", "rloo", "otb")
    assert found.also == ("optimize.learning_rate",) and "more than what is compared" in pairing_note(found)


def test_where_a_run_is_kept_is_no_difference():
    moved = {"a": config("rloo", 0, root="x"), "b": config("otb", 0, root="y")}
    assert pair_groups(moved, "estimator.name", "rloo", "otb").also == ()
    assert "root" not in group_keys(moved)


def test_one_pair_has_intervals_over_blocks_of_steps_and_says_so():
    found = pair_runs("a", "b")
    assert found.by == "step blocks" and "not for other seeds" in pairing_note(found)
    assert pair_groups({"a": config("rloo", 0), "b": config("otb", 0)}, "estimator.name", "rloo", "otb").by == found.by


def test_only_settings_in_which_a_seed_differs_form_groups():
    assert group_keys(SWEEP) == {"estimator.name": ["rloo", "otb"]}
    assert group_keys({"a": config("rloo", 0), "b": config("otb", 1)}) == {}
    both = {"a": config("rloo", 0), "b": config("rloo", 0, 1e-3), "c": config("otb", 0)}
    assert list(group_keys(both)) == ["estimator.name", "optimize.learning_rate"]


def test_the_first_run_meets_the_one_that_differs_least():
    runs = {"a": config("rloo", 0), "far": config("otb", 0, 1e-3), "near": config("otb", 0)}
    assert default_pairing(runs, list(runs)) == ("a", "near")
    assert default_pairing(runs, ["a"]) is None


def test_differences_that_explain_most_stand_first_and_where_a_run_is_kept_last():
    one = config("rloo", 0, 1e-4, root="a", evaluate={"every": 1}, lora={"rank": 0}, objective={"staleness": 0})
    other = config("otb", 1, 1e-3, root="b", evaluate={"every": 2}, lora={"rank": 8}, objective={"staleness": 4})
    found = config_differences({"x": one | {"sample": {"prompts": 1}}, "y": other | {"sample": {"prompts": 2}}})
    assert found.table["setting"].tolist() == [
        "estimator.name", "optimize.learning_rate", "objective.staleness", "sample.prompts", "lora.rank", "seed",
        "evaluate.every", "root",
    ]  # fmt: skip
