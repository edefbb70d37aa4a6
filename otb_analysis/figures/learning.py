"""Learning curves: is it learning, on prompts it trains on and on prompts it never sees?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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


OVER_RUNS = "mean over the runs of a group; band: from the lowest run to the highest"


def learning_info(steps: Mapping[str, pd.DataFrame], estimators: Mapping[str, str], window: int = 1) -> CurvesInfo:
    """Collect the reward curves of some runs; with several answers per held-out prompt also success and pass@k.

    Held-out prompts have panels where a run recorded them.
    """
    ks = {int(k) for t in steps.values() if "heldout_pass_k" in t for k in t["heldout_pass_k"].dropna()}
    several = (SUCCESS, _passing(ks)) if max(ks, default=1) > 1 else ()
    training, *heldout = (*QUANTITIES, *several)
    recorded = [q for q in heldout if any(q.column in t and t[q.column].notna().any() for t in steps.values())]
    return curves_info(steps, (training, *recorded), estimators, window)


def grouped_info(steps: Mapping[str, pd.DataFrame], groups: Mapping[str, Sequence[str]], window: int = 1) -> CurvesInfo:
    """Collect the mean over the runs of each group, of each run's running mean, at the steps that all of them have.

    The ends are the lowest and the highest run; a group of one run has none.
    """
    own = learning_info(steps, {}, window)
    tables = {name: _mean_of(own, runs) for name, runs in groups.items()}
    over_runs = [replace(one, line=OVER_RUNS, interval=True, smoothed=False) for one in own.quantities]
    return curves_info(tables, over_runs, {})


def _mean_of(info: CurvesInfo, runs: Sequence[str]) -> pd.DataFrame:
    columns = []
    for quantity, curves in zip(info.quantities, info.curves, strict=True):
        lines = [pd.Series(curve.smooth, curve.step) for curve in curves if curve.run in runs]
        together = pd.concat(lines, axis=1, join="inner") if lines else pd.DataFrame()
        ends = {"": together.mean(axis=1)}
        if len(lines) > 1:
            ends |= {"_low": together.min(axis=1), "_high": together.max(axis=1)}
        columns += [values.rename(f"{quantity.column}{end}") for end, values in ends.items()]
    return pd.concat(columns, axis=1).rename_axis("step").reset_index()


def _passing(ks: set[int]) -> Quantity:
    """Return the panel of pass@k, named after the one k that the runs have, if they have one."""
    k = str(next(iter(ks))) if len(ks) == 1 else "k"
    note = f"one of {k} answers is right, 95 % interval"
    return Quantity(f"Held-out pass@{k}", note, "heldout_pass_at_k", rare=True, interval=True)


def plot_learning(info: CurvesInfo) -> go.Figure:
    """Draw the curves, two in a row."""
    return plot_curves(info, columns=2, height=290)
