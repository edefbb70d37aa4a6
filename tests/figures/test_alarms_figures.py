import numpy as np
import pandas as pd

from otb_analysis.answers.triage import alarms_line
from otb_analysis.diagnostics import StepSeries, change_points, diagnose
from otb_analysis.figures.alarms import SIGNS, alarms_table
from otb_analysis.figures.timeline import timeline_info

CLIPPED = np.repeat([False, True, False], [35, 15, 10])
STEPS = pd.DataFrame({"step": np.arange(60), "grad_norm": [1.0] * 50 + [6.0] * 10, "clipped": CLIPPED})
SERIES = StepSeries(np.arange(60), {"grad_norm": STEPS["grad_norm"].to_numpy(), "clipped": CLIPPED.astype(float)})
FINDINGS = {"mine": diagnose(SERIES)}


def test_the_worst_alarm_comes_first_with_its_steps_and_reason():
    table = alarms_table(FINDINGS)
    assert table.columns.tolist() == ["run", "level", "detector", "first watch", "first alarm", "why"]
    assert table["detector"].tolist()[:2] == ["Gradient-norm surge", "Clipped steps"]
    assert table["level"].tolist()[:3] == [SIGNS["alarm"], SIGNS["watch"], SIGNS["not measured"]]
    # The median of five steps is 6 from step 52 on; 13 of 20 steps are clipped at step 47, never 17.
    assert table.loc[0, ["first watch", "first alarm"]].tolist() == [52, 52]
    assert table.loc[1, "first watch"] == 47 and table.loc[1, "first alarm"] is pd.NA
    assert "6 times the usual 1" in table.loc[0, "why"]


def test_levels_are_counted_in_words():
    assert alarms_line(FINDINGS) == "12 detectors on 1 run: 1 alarm, 1 watch, 8 not measured, 2 ok."
    short = {"mine": diagnose(SERIES.until(5))}
    assert alarms_line(short) == "12 detectors on 1 run: 0 alarm, 0 watch, 8 not measured, 2 too short, 2 ok."


def test_marks_stand_at_their_step_and_know_their_panel():
    found = {(e.column, e.kind, e.step) for e in timeline_info(STEPS, FINDINGS["mine"], change_points(SERIES)).events}
    assert found == {("grad_norm", "alarm", 52), ("clipped_share", "watch", 47), ("grad_norm", "change", 50)}
