"""One prompt's advantages under any estimator, computed again from the stored columns; cached."""

from collections.abc import Mapping
from typing import Any

import data
import numpy as np
import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.errors import InputError, StoreError
from otb_analysis.estimators import ESTIMATORS, available, entry_of, estimate, options_from_dict, registered, with_limit
from otb_analysis.figures.token_formula import TokenFormula, token_formula
from otb_analysis.store import TokenArrays
from otb_analysis.types import EstimatorInputs, Int, Label

SOURCES = ("proxy", "calibrated", "exact")


def words(label: Label) -> str:
    """Return how a label is called: `otb (exact)`, `rloo`."""
    name, source = label
    return name if source == "none" else f"{name} ({source})"


def ours(name: str) -> bool:
    """Return whether a name stands for an estimator of this package."""
    return registered(name) is not None


def trained(run: Run) -> Label:
    """Return the estimator that trained and its energies; none and another name where it is not one of ours."""
    settings = data.config(run).get("estimator")
    energy = settings.get("energy") if isinstance(settings, Mapping) else None
    reads = ours(run.estimator) and entry_of(run.estimator).reads_energy
    return (run.estimator, str(energy or "proxy") if reads else "none")


@st.cache_resource(max_entries=4, show_spinner=False)
def _arrays(run: Run, step: int, group: int | None) -> TokenArrays:
    return data.store(run).token_arrays(step, group)


def _inputs(run: Run, step: int, group: int, label: Label) -> tuple[EstimatorInputs, Int]:
    """Return an estimator's inputs and the rollouts of their rows: the prompt's, or the step's where prompts couple.

    Raises:
        InputError: An input is missing, or the estimator is somebody's own: a page runs no code that a run names.
    """
    if not ours(label[0]):
        raise InputError(f"{label[0]} is no estimator of otb-analysis, so its formula cannot be shown.")
    arrays = _arrays(run, step, None if entry_of(label[0]).batch_coupled else group)
    if label[1] == "exact":
        arrays = arrays.measured_groups()
    return arrays.estimator_inputs(label[1]), arrays.rollout


@st.cache_data(max_entries=64, show_spinner=False)
def labels(run: Run, step: int, group: int) -> list[Label]:
    """Return the estimators whose advantages are stored or can be computed for a prompt; the trained one is first."""
    first = trained(run)
    stored = bool(first[0]) and bool(data.tokens(run, step, group)["advantage"].notna().any())
    try:
        arrays = _arrays(run, step, group)
        found = [(name, "none") for name in _available(arrays, "none")]
    except (InputError, StoreError):  # no rewards, or nothing says which tokens the policy sampled
        return [first] if stored else []
    for source in SOURCES:
        try:
            names = _available(arrays.measured_groups() if source == "exact" else arrays, source)
        except InputError:  # not measured at every token
            continue
        found += [(name, source) for name in names if ESTIMATORS[name].reads_energy]
    return list(dict.fromkeys([first, *found] if stored or first in found else found))


def _available(arrays: TokenArrays, source: str) -> list[str]:
    return available(arrays.estimator_inputs(source)) if len(arrays.rollout) else []


def options_of(run: Run, label: Label) -> Any:
    """Return an estimator's options: as trained for the one that did, else its defaults, with the sampling limit."""
    settings, sample = (data.config(run).get(name) for name in ("estimator", "sample"))
    values = settings.get("options") if isinstance(settings, Mapping) and label == trained(run) else None
    options = options_from_dict(label[0], values) if isinstance(values, Mapping) and values else None
    sizes = [sample.get(name) for name in ("max_new_tokens", "max_turns")] if isinstance(sample, Mapping) else []
    limit = int(np.prod([n for n in sizes if isinstance(n, int)])) if sizes and isinstance(sizes[0], int) else 0
    return with_limit(label[0], options, limit)


@st.cache_data(max_entries=64, show_spinner=False)
def estimated(run: Run, step: int, group: int, label: Label) -> pd.DataFrame:
    """Return baseline and advantage of a prompt's policy tokens, by rollout and t."""
    inputs, rollouts = _inputs(run, step, group, label)
    found = estimate(label[0], inputs, options_of(run, label))
    rows, t = np.nonzero(inputs.mask & (inputs.group == group)[:, None])
    columns = {"baseline": found.baseline[rows, t], "advantage": found.advantage[rows, t]}
    return pd.DataFrame(columns, index=pd.MultiIndex.from_arrays([rollouts[rows], t], names=["rollout", "t"]))


def as_estimated(tokens: pd.DataFrame, run: Run, step: int, group: int, label: Label) -> pd.DataFrame:
    """Return a prompt's tokens with the baseline and advantage of an estimator."""
    if label == trained(run) and bool(tokens["advantage"].notna().any()):
        return tokens
    found = estimated(run, step, group, label)
    index = pd.MultiIndex.from_arrays([tokens["rollout"], tokens["t"]])
    return tokens.assign(**{name: found[name].reindex(index).to_numpy() for name in ("baseline", "advantage")})


@st.cache_data(max_entries=64, show_spinner="Asking the estimator …")
def written_out(run: Run, step: int, group: int, label: Label, rollout: int, t: int) -> TokenFormula | None:
    """Return an estimator's baseline at one token, written out."""
    inputs, rollouts = _inputs(run, step, group, label)
    return token_formula(label[0], inputs, rollouts, rollout, t, options_of(run, label))
