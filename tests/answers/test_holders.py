"""Who holds a step's gradient in two sentences, and the command that measures it where it is not known."""

import numpy as np
import pandas as pd

from otb_analysis.answers.holders import Attributed, attribution_command
from otb_analysis.diagnostics import AttributedTokens, attribute_step

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
