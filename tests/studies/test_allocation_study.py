"""Study 12: what a prompt is worth in groups of any size, against enumerated groups."""

from pathlib import Path

import numpy as np
import pytest

from studies.lib.enumeration.groups import group_moments, multisets
from studies.lib.enumeration.trees import TreeSpec, random_tree
from studies.lib.record import load_study

NAMES = load_study(Path(__file__).parent.parent.parent / "studies" / "12_allocation").names
SMALL = TreeSpec(vocabulary=2, horizon=2, shared=3)


@pytest.mark.parametrize("size", [2, 3])
def test_law_of_a_prompt_is_the_enumerated_variance_of_rloo(size):
    tree = random_tree(TreeSpec(vocabulary=3, horizon=2, shared=4), np.random.default_rng(1))
    gradient, _, a, b = NAMES["from_tree"](tree)
    exact = group_moments("rloo", tree, size)
    assert a / size + b / (size * (size - 1)) == pytest.approx(exact.variance, rel=1e-10)
    np.testing.assert_allclose(gradient, tree.gradient, atol=1e-12)


def test_law_from_rollouts_has_no_bias():
    tree = random_tree(SMALL, np.random.default_rng(2))
    members, prob = multisets(tree, 4)
    score = tree.score.sum(axis=1)
    found = [NAMES["from_rollouts"](score[one], tree.total[one])[1:] for one in members]
    np.testing.assert_allclose(prob @ np.array(found), NAMES["from_tree"](tree)[1:], atol=1e-12)


def test_equal_weights_have_no_bias_and_sizes_as_weights_have():
    rng = np.random.default_rng(3)
    trees = NAMES["prompts"](rng, 12, (0.3, 0.3))
    laws = NAMES["Laws"](*map(np.array, zip(*map(NAMES["from_tree"], trees), strict=True)))
    p = np.array([tree.objective for tree in trees])
    arms = NAMES["arms"](laws, p, {8: rng.binomial(8, p)}, 4)
    assert all(n.sum() == 4 * 12 for arm, (n, _) in arms.items() if arm != "half")
    rows = {arm: NAMES["worth"](laws, n, weight, 32) for arm, (n, weight) in arms.items()}
    assert all(row["bias"] < 1e-7 for arm, row in rows.items() if arm != "averaged") and rows["averaged"]["bias"] > 0.01
    assert min(rows, key=lambda arm: rows[arm]["within"]) == "best"
