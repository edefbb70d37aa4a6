"""An estimator of one's own by module:function: found, tried, checked, and every fault named."""

import sys

import numpy as np
import pytest

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, entry_of, estimate, options_from_dict

MODULE = """
import numpy as np
from otb_analysis.arrays import group_sum
from otb_analysis.errors import NonFiniteError


def mean(inputs, share=1.0, kind="whole", callback=print):
    '''A = R − share · mean of the group.

    More words.
    '''
    total = inputs.reward.sum(axis=1)
    center = group_sum(total, inputs.group) / group_sum(np.ones(len(total)), inputs.group)
    return (total - share * center)[:, None] * inputs.mask


def greedy(inputs):
    weight = inputs.energy if inputs.energy is not None else 1.0
    reward = inputs.reward
    reward += 5.0
    values = 0.0 if inputs.value is None else inputs.value
    return mean(inputs) * weight * inputs.ratio - values


def listed(inputs):
    assert inputs.token_id.dtype.kind == inputs.turn.dtype.kind == "i"
    return mean(inputs).tolist()


def sums(inputs):
    return inputs.reward.sum(axis=1)


def unfinished(inputs):
    with np.errstate(invalid="ignore", divide="ignore"):
        centered = mean(inputs)
        spread = np.sqrt(group_sum(centered[:, 0] ** 2, inputs.group))
        return centered / spread[:, None] * inputs.mask


def spilled(inputs):
    return np.ones(inputs.mask.shape)


def broken(inputs):
    raise RuntimeError("no\\nluck")


def polite(inputs):
    raise NonFiniteError("my own sentence.")


def told(inputs):
    return {"advantage": 1}


def ragged(inputs):
    return [[1.0], [1.0, 2.0]]


def first_column(inputs):
    if len(inputs.mask) != 16:
        return inputs.reward[:, :1]
    return inputs.reward


number = 5
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory with a module, which the command runs in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_baselines.py").write_text(MODULE)
    yield
    sys.modules.pop("my_baselines", None)


@pytest.fixture
def inputs():
    """Two groups; a tool token stands in the middle of the first rollout; what is outside the mask is no number."""
    mask = np.array([[1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
    reward = np.where(mask, [[0, 0, 1.0], [0, 3.0, 0], [0.5, 0, 1.5], [0, 0, 0]], np.nan)
    return EstimatorInputs(reward, mask, np.array([4, 4, 9, 9]))


def test_advantage_is_what_the_function_returns_and_the_baseline_what_is_missing_to_the_return(inputs):
    found = estimate("my_baselines:mean", inputs)
    assert found.advantage.tolist() == [[-1, 0, -1], [1, 1, 0], [1, 1, 1], [-1, 0, 0]]
    assert found.baseline.tolist() == [[2, 0, 2], [2, 2, 0], [1, 0.5, 0.5], [1, 0, 0]]
    assert not found.fallback.any()


def test_a_copy_of_a_catalogued_estimator_gives_the_same(inputs):
    own, catalogued = estimate("my_baselines:mean", inputs), estimate("group_mean", inputs)
    returned = catalogued.advantage + catalogued.baseline  # group_mean centers returns to go by the mean total
    np.testing.assert_allclose((own.advantage + own.baseline)[inputs.mask], returned[inputs.mask])
    terminal = EstimatorInputs(np.array([[0, 1.0], [0, 0], [0, 1]]), np.ones((3, 2), bool), np.zeros(3, int))
    np.testing.assert_allclose(
        estimate("my_baselines:mean", terminal).advantage, estimate("group_mean", terminal).advantage
    )


def test_parameters_with_a_number_or_a_text_are_options(inputs):
    options = options_from_dict("my_baselines:mean", {"share": "0.5"})
    assert (options.share, options.kind) == (0.5, "whole")
    assert estimate("my_baselines:mean", inputs, options).advantage[0].tolist() == [0, 0, 0]
    with pytest.raises(InputError, match=r"'callback' .*my_baselines:mean; .*share, kin"):
        options_from_dict("my_baselines:mean", {"callback": "x"})


def test_what_the_trial_reads_is_needed_or_used_and_nothing_is_claimed():
    entry = entry_of("my_baselines:greedy")
    assert (entry.needs, entry.uses) == (("ratio", "energy"), ("value",))
    assert (entry.unbiased, entry.conditions, entry.batch_coupled) == (False, "not known", True)
    assert entry_of("my_baselines:mean").needs == ()
    assert entry_of("my_baselines:mean").formula == "A = R − share · mean of the group."
    assert entry_of("my_baselines:mean") is entry_of("my_baselines:mean")


def test_needed_input_that_is_missing_is_named_and_what_is_not_there_is_left_out(inputs):
    with pytest.raises(InputError, match=r"^my_baselines:greedy needs ratio and energy"):
        estimate("my_baselines:greedy", inputs)
    whole = EstimatorInputs(**{**vars(inputs), "energy": np.ones((4, 3)), "ratio": np.full((4, 3), 2.0)})
    assert np.isfinite(estimate("my_baselines:greedy", whole).advantage).all()
    assert np.isnan(inputs.reward).sum() == 4  # it changed a copy
    assert available(whole, ["my_baselines:greedy"]) == [*available(whole), "my_baselines:greedy"]
    assert available(inputs, ["my_baselines:greedy", "none"]) == available(inputs)


def test_lists_of_numbers_will_do():
    assert entry_of("my_baselines:listed").needs == ("turn", "token_id")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "my_baselines:sums",
            "returned an array of shape (16,) in a trial on 4 prompts of 4 rollouts; return advantages",
        ),
        (
            "my_baselines:unfinished",
            "returned nan at rollout 0, token 0 in a trial on 4 prompts of 4 rollouts; return fin",
        ),
        (
            "my_baselines:spilled",
            "returned 1 at rollout 1, token 4, outside the mask, in a trial on 4 prompts of 4 roll",
        ),
        (
            "my_baselines:broken",
            "failed in a trial on 4 prompts of 4 rollouts (RuntimeError: no luck); mend the function",
        ),
        (
            "my_baselines:told",
            "returned a dict in a trial on 4 prompts of 4 rollouts; return advantages of shape [N, T] =",
        ),
        ("my_baselines:ragged", "returned a list in a trial on 4 prompts"),
        ("my_baselines:number", "is a int; name a function of EstimatorInputs"),
        ("my_baselines:meen", "module my_baselines has no 'meen'; did you mean 'mean'? Known: mean, greedy,"),
        (
            "my_baseline:mean",
            "(ModuleNotFoundError: No module named 'my_baseline'); did you mean 'my_baselines'? Pass mod",
        ),
        (
            "nowhere_at_all:mean",
            "(ModuleNotFoundError: No module named 'nowhere_at_all'); pass module:attribute, with the",
        ),
        (":mean", "(ValueError: Empty module name)"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_that_names_it(name, named):
    with pytest.raises(InputError) as caught:
        entry_of(name)
    assert str(caught.value).startswith(f"estimator {name!r}")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sentence_of_ones_own_passes():
    with pytest.raises(NonFiniteError, match=r"^my own sentence\.$"):
        entry_of("my_baselines:polite")


def test_what_goes_wrong_after_the_trial_is_named_too(inputs):
    sentence = (
        r"'my_baselines:first_column' returned an array of shape \(4, 1\) on the rollouts it was given; return adv"
    )
    with pytest.raises(InputError, match=sentence):
        estimate("my_baselines:first_column", inputs)
    with pytest.raises(InputError, match="reward is nan at rollout 0, token 1"):
        estimate("my_baselines:mean", EstimatorInputs(inputs.reward, np.ones((4, 3), bool), inputs.group))


def test_misspelt_name_is_answered_with_the_nearest_and_how_ones_own_is_named():
    with pytest.raises(InputError, match=r"'otbb' .*mean 'otb'\? .*module:function"):
        entry_of("otbb")
    assert not any(":" in name for name in ESTIMATORS)
