"""Who holds a step's gradient in two sentences, and the command that measures it where it is not known."""

import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.holders import Attributed, attribution_command
from otb_analysis.answers.prompt import prompt_view
from otb_analysis.diagnostics import AttributedTokens, attribute_step
from otb_analysis.report.records import diagnosis_record
from otb_analysis.store import RunStore, RunWriter, StepTables

SIGNAL, NOISE = np.array([1.0, -2.0, 0.5, 0.0, 1.0]), np.array([3.0, 1.0, 0.5, -1.5, 0.5])
KEYS = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 2, 2]), np.array([0, 1, 0, 0, 1])


def test_the_line_says_who_holds_half_and_what_is_missing():
    split, bare = AttributedTokens(*KEYS, SIGNAL + NOISE, SIGNAL, NOISE), AttributedTokens(*KEYS, SIGNAL)
    words, more = (Attributed(attribute_step(7, of), pd.DataFrame(), pd.DataFrame()).says for of in (split, bare))
    assert "2 of 5 tokens (40.0%) hold half" in words and "noise" in words
    assert "--measure.attribution.split" in more


def test_a_trained_run_is_trained_again_and_a_scored_one_scored_again():
    how, command = attribution_command("/r/mine", {"optimize": {}, "model": ""}, 21)
    assert how.endswith("measures it from step 21 on:")
    assert command == (
        "otb train --config /r/mine/run.json --run mine-attributed --measure.attribution.first 21 "
        "--measure.attribution.every 1"
    )
    scored = {"model": "m", "rollouts": "a b.jsonl", "group_size": 8, "temperature": 1.0}
    assert attribution_command("/r/mine", scored, 0)[1] == (
        "otb score --model m --rollouts 'a b.jsonl' --group-size 8 --temperature 1.0 --root /r --run mine-attributed "
        "--measure.attribution.every 1"
    )
    assert attribution_command("/r/mine", {}, 0)[1] == ""


def unattributed(root, **columns):
    """A run of one step with two prompts of two rollouts, and what its four tokens carry."""
    rows = {"group": [0, 0, 1, 1], "rollout": [0, 1, 2, 3]}
    tokens = rows | {"turn": [0] * 4, "t": [0] * 4, "token": list("abcd"), "mask": [True] * 4, "reward": [1.0] * 4}
    rollouts = rows | {"prompt_id": list("ppqq"), "prompt": list("PPQQ"), "completion": list("abcd")}
    writer = RunWriter.create(root, "run", {})
    tables = StepTables(tokens | columns, rollouts | {"reward": [1.0] * 4}, {"reward_mean": 1.0, "grad_norm": 1.0})
    writer.write_step(0, tables)
    writer.finish()
    return RunStore(writer.path)


PROXY = {"advantage": [1.0, 2.0, -3.0, 0.0], "energy_proxy": [1.0, 1.0, 1.0, 9.0]}
DRAWN = {"grad_norm_sq": np.ma.array([1.0, 2.0, 0.0, 0.0], mask=[1, 0, 1, 1]), "measured_by": ["exact"] * 4}
EXACT = {"grad_norm_sq": np.ma.array([1.0, 2.0, 0.0, 0.0], mask=[0, 0, 1, 1]), "measured_by": ["exact"] * 4}


@pytest.mark.parametrize(
    ("columns", "by", "sizes", "tokens"),
    [
        (PROXY, "the proxy", [9 / 14, 4 / 14, 1 / 14, 0.0], list("cbad")),
        (PROXY | DRAWN, "the proxy", [9 / 14, 4 / 14, 1 / 14, 0.0], list("cbad")),
        (PROXY | EXACT, "exact norms of 1 of 2 prompts", [8 / 9, 1 / 9], list("ba")),
    ],
)
def test_without_an_attribution_tokens_are_ranked_by_size(columns, by, sizes, tokens, tmp_path):
    store = unattributed(tmp_path, **columns)
    found = RunAnswers(store).sizes(0)
    table = found.holders("token")
    assert found.by == by and f"by {by}. That is each token's own length" in found.says
    assert table["share"].tolist() == pytest.approx(sizes) and table["token"].tolist() == tokens
    assert prompt_view(store, None, None, "", "").group == found.shares.prompts.group[0]
    assert prompt_view(store, None, None, "", "", rollout=3).group == 1
    record = diagnosis_record(RunAnswers(store), 0)
    assert record["sizes"]["says"] == found.says and record["sizes"]["grad_norm_sq"] is None


def test_without_advantages_or_where_all_are_0_no_size_is_known(tmp_path):
    for name, columns in (("none", {"energy_proxy": [1.0] * 4}), ("zero", PROXY | {"advantage": [0.0] * 4})):
        store = unattributed(tmp_path / name, **columns)
        assert RunAnswers(store).sizes(0) is None and prompt_view(store, None, None, "", "").group == 0
