import json
import re
from pathlib import Path

import pytest

from otb_analysis.diagnostics import DETECTORS
from otb_analysis.figures.alarms import COLLAPSED, RATES, false_alarms, foresight

ROOT = Path(__file__).parents[2]


def test_every_detector_has_its_rates():
    assert list(RATES) == list(DETECTORS)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="installed without its repository")
def test_false_alarms_are_those_of_the_committed_measurement():
    rows = json.loads((ROOT / "docs/results/alarms.json").read_text())["rows"]
    lengths = {row["detector"]: row["lengths"].values() for row in rows}
    measured = {name: max(round(length["rate"], 3) for length in lengths[name]) for name in DETECTORS}
    assert {name: rates.false_alarms for name, rates in RATES.items()} == measured


@pytest.mark.skipif(not (ROOT / "studies").is_dir(), reason="installed without its repository")
def test_foresight_is_that_of_study_05():
    page = (ROOT / "studies/05_collapse/README.md").read_text()
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 9}
    for name, rates in RATES.items():
        in_time, at_all = (re.fullmatch(rf" (\d+) of {COLLAPSED} ", rows[name][i]) for i in (2, 4))
        assert rates.in_time == (in_time and int(in_time[1])) and rates.at_all == (at_all and int(at_all[1]))
        # A detector of old rollouts calls every run that has not collapsed, too.
        assert rates.stale == bool(re.fullmatch(r" (\d+) of \1 ", rows[name][5]))


def test_rates_are_said_in_words():
    assert false_alarms("gradient_surge") == "1.4 %" and false_alarms("reward_fall") == "under 0.1 %"
    assert foresight("zero_variance_groups") == "0 of 93 before, 57 at all"
    assert foresight("ratio_tails") == "93 of 93 before, 93 at all; calls old rollouts, not the collapse"
    assert foresight("tail_index") == "not measured"
