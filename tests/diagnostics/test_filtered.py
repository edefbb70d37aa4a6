"""No group is dead: chance, or filtered before it was written?"""

import numpy as np
import pytest

from otb_analysis.answers.measured import size_line
from otb_analysis.diagnostics.planner import filtered_groups, plan


def drawn(count, size, rates, kept=lambda group: True):
    """Groups of rewards 0 and 1, one of each rate in turn; those that are not `kept` are drawn again."""
    random, groups = np.random.default_rng(0), []
    while len(groups) < count:
        group = (random.random(size) < rates[len(groups) % len(rates)]).astype(float).tolist()
        groups += [group] if kept(group) else []
    return groups


def alive(group):
    return len(set(group)) > 1


def test_the_chance_is_that_of_the_success_rate():
    # p = ½ alone: of groups of 8, 2/256 are dead; of 2,000 groups 15.6, and none with probability (254/256)^2000.
    found = filtered_groups(drawn(2000, 8, [0.5], alive))
    assert found is not None and found.n_groups == 2000
    assert found.expected == pytest.approx(2000 * 2 / 256, rel=0.15)
    assert np.log(found.chance) == pytest.approx(2000 * np.log(254 / 256), rel=0.15)
    assert found.line.startswith("None of 2,000 groups is dead, though 1") and len(found.line.split()) <= 40


def test_groups_that_are_seldom_dead_are_not_called_filtered():
    assert filtered_groups(drawn(500, 64, [0.4, 0.5, 0.6])) is None
    assert filtered_groups(drawn(100, 8, [0.5], alive)) is None  # 0.8 expected: none is likely


def test_files_that_were_not_filtered_are_never_called_so():
    random = np.random.default_rng(1)
    files = [[(random.random(8) < rate).astype(float).tolist() for rate in random.beta(4, 4, 60)] for _ in range(300)]
    without = [groups for groups in files if all(map(alive, groups))]
    assert len(without) > 5 and all(filtered_groups(groups) is None for groups in without)


@pytest.mark.parametrize(
    "groups",
    [
        [[0.0, 0.0], [1.0, 0.0]] * 100,  # one is dead
        [[0.0, 0.5], [1.0, 0.0]] * 100,  # three values
        [[0.0], [1.0]] * 100,  # groups of one
        [],
    ],
)
def test_nothing_is_said_where_nothing_follows(groups):
    assert filtered_groups(groups) is None


def test_rewards_of_minus_one_and_one_and_mixed_sizes_are_read_alike():
    groups = drawn(150, 4, [0.2, 0.5, 0.8], alive) + drawn(150, 6, [0.2, 0.5, 0.8], alive)
    found, other = filtered_groups(groups), filtered_groups([[2 * r - 1 for r in group] for group in groups])
    assert found is not None and found == other


def test_the_planner_and_the_headline_say_that_dead_groups_were_filtered():
    groups = drawn(300, 4, [0.1, 0.5, 0.9], alive)
    planner = plan({}, {}, list(enumerate(groups)), 1)
    assert planner.filtered is not None and planner.note.endswith(planner.filtered.note)
    assert "From success rates alone" in planner.note and size_line(planner, ()) == planner.filtered.line
