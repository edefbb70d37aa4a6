"""A run of soft tokens: every page opens it although these have no proxy."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.config import EstimatorConfig, SampleConfig

APP = Path(__file__).parents[2] / "app" / "streamlit_app.py"


@pytest.mark.parametrize("page", ["triage", "run", "rollouts", "tokens", "estimators", "compare"])
def test_every_page_opens_a_run_of_soft_tokens(page, trained, monkeypatch):
    sample = SampleConfig(prompts=4, group_size=3, max_new_tokens=6, soft=2)
    path = trained("soft-app", sample=sample, estimator=EstimatorConfig(name="rloo"))
    monkeypatch.setenv("OTB_RUNS", str(path.parent))
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params["run"] = path.name
    app.run()
    if page != "triage":
        app.switch_page(f"views/{page}.py").run()
    assert not app.exception
