"""What looks at other prompts is unbiased: every batch of three prompts, each with a policy of its own, enumerated.

The catalogue names the first test.
"""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, RegressionOptions, estimate
from studies.lib.enumeration.trees import TreeSpec, random_tree
from tests.enumerated_batches import batch_means

SPEC = TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True)
ALL = RegressionOptions(T_max=2)
NAMES = {"energy_across_loo": None, "energy_regression": ALL}


def policies(seed, spec=SPEC, count=3):
    rng = np.random.default_rng([seed, 8])
    return [random_tree(spec, rng) for _ in range(count)]


def largest_bias(name, trees, n, options=None, state=None):
    """‖E ḡ_p − ∇J_p‖/‖∇J_p‖ of the worst prompt."""
    means = batch_means(name, trees, n, options, state)
    off = [np.linalg.norm(m - t.gradient) / np.linalg.norm(t.gradient) for m, t in zip(means, trees, strict=True)]
    return max(off)


def joined(trees, seed, n=4):
    """One sampled batch of all trees."""
    rng, parts = np.random.default_rng(seed), []
    for tree in trees:
        parts.append(vars(tree.inputs(rng.choice(len(tree.prob), n, p=tree.prob), np.zeros(n, np.int64))))
    columns = {key: np.concatenate([part[key] for part in parts]) for key, x in parts[0].items() if x is not None}
    return replace(trees[0].inputs(np.arange(1), np.zeros(1, np.int64)), **columns | {"group": np.arange(3 * n) // n})


@pytest.mark.parametrize("name", [name for name, e in ESTIMATORS.items() if e.unbiased and e.batch_coupled])
@pytest.mark.parametrize("seed", range(24))
def test_no_bias_in_batches_of_three_prompts(name, seed):
    assert largest_bias(name, policies(seed), 2, NAMES.get(name)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_no_bias_with_three_positions_and_rewards_at_every_token(name):
    spec = replace(SPEC, horizon=3, dense=True, shared=None)
    options = NAMES[name] and RegressionOptions(T_max=3, ridge=0.0)
    assert largest_bias(name, policies(0, spec), 2, options) < 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_no_bias_where_every_prompt_has_one_rollout(name):
    assert largest_bias(name, policies(1), 1, NAMES[name]) < 1e-12


def test_memory_of_earlier_steps_leaves_it_unbiased():
    trees = policies(2)
    options = replace(ALL, memory=0.9)
    before = estimate("energy_regression", joined(policies(3), seed=0), options).state
    assert largest_bias("energy_regression", trees, 2, options, before) < 1e-12


def test_remembering_the_rollouts_themselves_would_bias_it():
    # the same sums with the own prompt's rollouts in them: each batch is given its own state
    trees, options = policies(2), replace(ALL, memory=1.0)

    def selfish(name, inputs, _):
        state = estimate(name, inputs, options).state
        return estimate(name, replace(inputs, state=state), options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.enumerated_batches.estimate", selfish)
        assert largest_bias("energy_regression", trees, 2) > 0.01


def test_unclipped_ratios_leave_the_mean_where_no_baseline_has_it():
    trees = [tree.sampled_by(other) for tree, other in zip(policies(4), policies(5), strict=True)]
    plain = batch_means("none", trees, 2)
    for name, options in NAMES.items():
        for got, expected in zip(batch_means(name, trees, 2, options), plain, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-13)


def test_batches_too_many_to_enumerate_are_refused():
    with pytest.raises(InputError, match="batches but at most 200000"):
        batch_means("rloo", policies(0, replace(SPEC, horizon=4)), 5)
