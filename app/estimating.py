"""One prompt's advantages under any estimator, computed again from the stored columns; cached."""

import data
import pandas as pd
import streamlit as st
from listing import Run

from otb_analysis.figures.token_formula import TokenFormula, token_formula
from otb_analysis.store import StoredPrompt, TokenArrays
from otb_analysis.store.prompt import trained_label
from otb_analysis.types import Label


@st.cache_resource(max_entries=4, show_spinner=False)
def _arrays(run: Run, step: int, group: int | None) -> TokenArrays:
    return data.store(run).token_arrays(step, group)


def _prompt(run: Run, step: int, group: int) -> StoredPrompt:
    tokens = data.tokens(run, step, group)
    return StoredPrompt(run.estimator, data.config(run), group, tokens, lambda of: _arrays(run, step, of))


def trained(run: Run) -> Label:
    """Return the estimator that trained and its energies."""
    return trained_label(run.estimator, data.config(run))


@st.cache_data(max_entries=64, show_spinner=False)
def labels(run: Run, step: int, group: int) -> list[Label]:
    """Return the estimators whose advantages are stored or can be computed for a prompt; the trained one is first."""
    return _prompt(run, step, group).labels()


@st.cache_data(max_entries=64, show_spinner=False)
def as_estimated(run: Run, step: int, group: int, label: Label) -> pd.DataFrame:
    """Return a prompt's tokens with the baseline and advantage of an estimator."""
    return _prompt(run, step, group).under(label)


@st.cache_data(max_entries=64, show_spinner="Asking the estimator …")
def written_out(run: Run, step: int, group: int, label: Label, rollout: int, t: int) -> TokenFormula | None:
    """Return an estimator's baseline at one token, written out."""
    prompt = _prompt(run, step, group)
    inputs, rollouts = prompt.inputs(label)
    return token_formula(label[0], inputs, rollouts, rollout, t, prompt.options(label))
