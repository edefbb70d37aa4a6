"""Learning curves: is it learning, on prompts it trains on and on prompts it never sees?"""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.curves import CurvesInfo, Quantity, curves_info, plot_curves

QUANTITIES = (
    Quantity("Training reward", "mean of the step's rollouts", "reward_mean"),
    Quantity("Held-out reward", "prompts never trained on", "heldout_reward", rare=True),
)


def learning_info(steps: Mapping[str, pd.DataFrame], estimators: Mapping[str, str], window: int = 1) -> CurvesInfo:
    """Collect the reward curves of some runs.

    Args:
        steps: Steps table of each run.
        estimators: Training estimator of each run.
        window: Length of the running mean of the training reward, in recorded steps.
    """
    return curves_info(steps, QUANTITIES, estimators, window)


def plot_learning(info: CurvesInfo) -> go.Figure:
    """Draw both reward curves side by side.

    Args:
        info: From `learning_info`.
    """
    return plot_curves(info, columns=2, height=290)
