import pytest

from otb_analysis.training import progress
from otb_analysis.training.progress import Watch, duration

ROW = {"reward_mean": 0.5, "grad_norm": 2.0, "entropy_mean": 1.25, "clipped": True, "n_tokens": 300}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7500, "2:05 h")]
)
def test_durations_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


def test_line_holds_the_numbers_people_watch(monkeypatch):
    clock = iter([100.0, 106.0])
    monkeypatch.setattr(progress, "perf_counter", lambda: next(clock))
    # Begun at step 4; steps 4 and 5 took 6 s, so 4 more of 10 take 12 s; 300 tokens in 0.2 s.
    line = Watch("r", 4, 10).line(5, ROW | {"seconds_sample": 0.2, "ratio_clip_share": None})
    assert line == "r: reward 0.50, ‖ḡ‖ 2.0, entropy 1.250, ‖ḡ‖ clipped, 1,500 tokens/s, 12 s left"


def test_objective_with_ratios_shows_its_clip_share():
    line = Watch("r", 0, 1).line(0, ROW | {"seconds_sample": 1.0, "ratio_clip_share": 0.125})
    assert ", clip 12.5%, 300 tokens/s, 0 s left" in line
