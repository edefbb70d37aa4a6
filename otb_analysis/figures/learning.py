"""Learning curves: is it learning, on prompts it trains on and on prompts it never sees?"""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.curves import CurvesInfo, Quantity, curves_info, plot_curves

QUANTITIES = (
    Quantity("Training reward", "mean of the step's rollouts", "reward_mean"),
    Quantity("Held-out reward", "prompts never trained on, 95 % interval", "heldout_reward", rare=True, interval=True),
)
SUCCESS = Quantity(
    "Held-out success", "share of right answers, 95 % interval", "heldout_success", rare=True, interval=True
)


def learning_info(steps: Mapping[str, pd.DataFrame], estimators: Mapping[str, str], window: int = 1) -> CurvesInfo:
    """Collect the reward curves of some runs; with several answers per held-out prompt also success and pass@k."""
    ks = {int(k) for t in steps.values() if "heldout_pass_k" in t for k in t["heldout_pass_k"].dropna()}
    several = (SUCCESS, _passing(ks)) if max(ks, default=1) > 1 else ()
    return curves_info(steps, (*QUANTITIES, *several), estimators, window)


def _passing(ks: set[int]) -> Quantity:
    """Return the panel of pass@k, named after the one k that the runs have, if they have one."""
    k = str(next(iter(ks))) if len(ks) == 1 else "k"
    note = f"one of {k} answers is right, 95 % interval"
    return Quantity(f"Held-out pass@{k}", note, "heldout_pass_at_k", rare=True, interval=True)


def plot_learning(info: CurvesInfo) -> go.Figure:
    """Draw the curves, two in a row."""
    return plot_curves(info, columns=2, height=290)
