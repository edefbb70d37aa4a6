"""The example that TRL recorded, shipped with the documents, is read as what it is."""

from pathlib import Path

import numpy as np

from otb_analysis.config import ImportConfig, ScoreConfig
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore

EXAMPLE = Path(__file__).parent.parent.parent / "docs" / "examples" / "trl"


def test_tables_of_TRL_become_a_run(tmp_path):
    store = RunStore(import_rollouts(EXAMPLE, ImportConfig(root=tmp_path)))
    assert store.info["config"]["source"]["format"] == "trl"
    assert store.complete_steps() == [1, 2]
    steps = store.steps_df()
    assert steps["n_prompts"].tolist() == [2, 2]
    assert steps["n_rollouts"].tolist() == [8, 8]
    rollouts = store.sql("select * from rollouts order by step, rollout")
    np.testing.assert_allclose(rollouts["reward"], rollouts["reward_correct"] + rollouts["reward_form"])


def test_records_of_the_same_rollouts_agree_with_the_tables_and_are_scored(tmp_path):
    tables = RunStore(import_rollouts(EXAMPLE, ImportConfig(root=tmp_path)))
    config = ScoreConfig(rollouts=EXAMPLE / "rollouts.jsonl", model="demo", root=tmp_path)
    scored = RunStore(score(config))
    query = "select prompt, reward from rollouts order by step, rollout"
    assert tables.sql(query)["prompt"].tolist() == scored.sql(query)["prompt"].tolist()
    np.testing.assert_allclose(tables.sql(query)["reward"], scored.sql(query)["reward"])
    assert scored.steps_df()["certificate_prob_z"].abs().max() < 4  # the demo's policy wrote them
