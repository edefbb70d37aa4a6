"""A run of soft tokens: every page opens it although these have no proxy."""

import pytest

from otb_analysis.config import EstimatorConfig, SampleConfig
from tests.app.test_pages import open_page


@pytest.mark.parametrize("page", ["triage", "run", "rollouts", "tokens", "estimators", "compare"])
def test_every_page_opens_a_run_of_soft_tokens(page, trained, monkeypatch):
    sample = SampleConfig(prompts=4, group_size=3, max_new_tokens=6, soft=2)
    path = trained("soft-app", sample=sample, estimator=EstimatorConfig(name="rloo"))
    assert not open_page(path.parent, page, monkeypatch, run=path.name).exception
