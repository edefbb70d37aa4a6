import pytest

from otb_analysis.config import AttributionSchedule, MeasureConfig
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore, attributed_steps, step_attribution


@pytest.fixture(scope="module")
def store(trained):
    return RunStore(trained("attributed", measure=MeasureConfig(attribution=AttributionSchedule(every=2))))


def test_shares_of_a_trained_step_add_up_to_the_gradient_that_the_optimiser_saw(store):
    assert attributed_steps(store) == [0, 2]
    found = step_attribution(store, 2)
    assert found.recorded_norm_sq > 0
    assert abs(found.gap) < 1e-5
    assert found.tokens.share.sum() == pytest.approx(found.prompts.share.sum())
    assert found.signal_total + found.noise_total == pytest.approx(found.norm_sq)
    assert len(found.prompts) == 4 and len(found.rollouts) == 12
    assert len(found.tokens) == store.sql("SELECT count(*) AS n FROM tokens WHERE mask AND step = 2")["n"].iloc[0]


def test_a_step_that_was_not_attributed_names_those_that_were(store):
    with pytest.raises(InputError, match=r"step 1 .*no attribution, steps 0, 2"):
        step_attribution(store, 1)


def test_a_run_without_the_level_says_what_measures_it(otb_run):
    with pytest.raises(InputError, match="no step of this run has"):
        step_attribution(RunStore(otb_run), 0)
