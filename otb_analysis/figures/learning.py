"""Learning curves: is it learning, on prompts it trains on and on prompts it never sees?"""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.curves import CurvesInfo, Quantity, curves_info, plot_curves

QUANTITIES = (
    Quantity("Training reward", "mean of the step's rollouts", "reward_mean"),
    Quantity("Held-out reward", "prompts never trained on, 95 % interval", "heldout_reward", rare=True, interval=True),
)
SEVERAL = (
    Quantity("Held-out success", "share of right answers, 95 % interval", "heldout_success", rare=True, interval=True),
    Quantity("Held-out pass@k", "chance that one of k answers is right", "heldout_pass_at_k", rare=True, interval=True),
)
"""Shown where some run sampled several answers to each held-out prompt."""


def learning_info(steps: Mapping[str, pd.DataFrame], estimators: Mapping[str, str], window: int = 1) -> CurvesInfo:
    """Collect the reward curves of some runs, and success on held-out prompts where they were answered several times.

    Args:
        steps: Steps table of each run.
        estimators: Training estimator of each run.
        window: Length of the running mean of the training reward, in recorded steps.
    """
    several = any("heldout_pass_k" in table and (table["heldout_pass_k"] > 1).any() for table in steps.values())
    return curves_info(steps, QUANTITIES + (SEVERAL if several else ()), estimators, window)


def plot_learning(info: CurvesInfo) -> go.Figure:
    """Draw the curves, two in a row.

    Args:
        info: From `learning_info`.
    """
    return plot_curves(info, columns=2, height=290)
