import pytest

from otb_analysis.training.runtime import silent, step_line, unfailing

ROW = {"reward_mean": 0.5, "grad_norm": 2.0, "entropy_mean": 1.25, "clipped": True, "n_tokens": 300}


def test_line_holds_the_numbers_people_watch():
    line = step_line("r", 5, 10, ROW | {"seconds_sample": 0.2, "ratio_clip_share": None})
    assert line == "r: 6 of 10 steps, reward 0.50, ‖ḡ‖ 2.0, entropy 1.250, ‖ḡ‖ clipped, 1,500 tokens/s"


def test_objective_with_ratios_shows_its_clip_share():
    assert ", clip 12.5%, 300 tokens/s" in step_line(
        "r", 0, 1, ROW | {"seconds_sample": 1.0, "ratio_clip_share": 0.125}
    )


def test_bar_that_fails_is_one_warning_and_then_silent():
    calls = []

    def broken(done, total, text):
        calls.append(done)
        raise ZeroDivisionError("by zero")

    bar = unfailing(broken)
    with pytest.warns(RuntimeWarning, match="no longer shown: by zero"):
        bar(1, 2, "")
    bar(2, 2, "")
    assert calls == [1]


def test_interrupt_passes_through_a_bar():
    def interrupted(done, total, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unfailing(interrupted)(0, 1, "")
    unfailing(silent)(0, 1, "")
