"""What the free proxy costs, in a sentence: only as much as its interval says."""

import numpy as np
import pytest

from otb_analysis.answers.proxy import EXACT, PROXY, Proxy, fidelity_of, proxy_line, proxy_of
from otb_analysis.config import MeasureConfig, SampledSchedule, Schedule
from otb_analysis.figures.fidelity import fidelity_columns, fidelity_info
from otb_analysis.statistics import NOTHING, REFERENCE, Gram, Interval, paired_ratios
from otb_analysis.store import RunStore, measured
from otb_analysis.store.measured import exact_groups


def proxy(kept=None, within=None):
    return Proxy(1000, None, *(of and Interval(0.9, *of, 40, "") for of in (within, kept)), None)


@pytest.mark.parametrize(
    ("kept", "within", "words"),
    [
        ((0.93, 1.02), None, ("Use the proxy", "0.90 (0.93–1.02)")),
        ((0.93, 0.98), None, ("Use the proxy",)),  # it costs, less than 10 %
        ((0.7, 0.85), None, ("The proxy costs", "0.90 (0.70–0.85)")),
        ((0.7, 1.1), None, ("not shown to cost",)),
        ((0.001, 0.9), (0.6, 0.8), ("log correlation", "(0.60–0.80)", "not known")),
        ((None, None), None, ("not known",)),
        (None, (None, None), ("what it costs otb is not known",)),
    ],
)
def test_the_sentence_claims_what_the_interval_leaves(kept, within, words):
    line = proxy_line(proxy(kept, within))
    assert all(word in line for word in words) and len(line.split()) <= 40


def test_a_runs_proxy_is_judged_on_its_own_rollouts_by_efficiency_and_not_where_noise_hides_the_gradient(otb_run):
    store = RunStore(otb_run)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(64, 12))
    g = np.eye(12)[0] + np.stack([1.2 * noise, 0.5 * noise, noise])
    labels = (REFERENCE, EXACT, PROXY)
    gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), labels, 256)
    found = proxy_of(store, [gram], NOTHING)
    (pair,) = paired_ratios([gram], against=EXACT, only=[PROXY])
    assert (found.kept.low, found.kept.high) == (pair.efficiency.low, pair.efficiency.high)
    assert found.n_tokens > 0 and found.gain_lost is not None and -1 <= found.within.estimate <= 1
    lost = g - g.mean(axis=1, keepdims=True)
    hidden = proxy_of(store, [Gram(np.einsum("mpd,nqd->mnpq", lost, lost), labels, 256)], NOTHING)
    assert hidden.kept is None and "not known" in proxy_line(hidden)
    assert proxy_of(store, [], NOTHING).kept is None


def test_one_prompt_measured_whole_does_not_hide_what_was_drawn_of_the_others(trained):
    measure = MeasureConfig(
        exact=Schedule(every=1, prompts=1), sampled=SampledSchedule(every=1, share=0.5, by="proxy"), subgroups=()
    )
    store = RunStore(trained("drawn", measure=measure))
    found = proxy_of(store, [], NOTHING)
    assert found is not None and found.drawn and found.within is None
    assert found.n_tokens == int(store.tokens_df()["grad_norm_sq"].notna().sum())


def test_of_very_many_measured_tokens_every_door_takes_the_same_prompts(otb_run, monkeypatch):
    every = proxy_of(RunStore(otb_run), [], NOTHING).n_tokens
    monkeypatch.setattr(measured, "MAX_TOKENS", every // 2)
    monkeypatch.setattr(measured, "LEAST_GROUPS", 1)
    found, (_, of_tokens), _ = proxy_of(store := RunStore(otb_run), [], NOTHING), *fidelity_of(store)
    page = fidelity_info(exact_groups(store, fidelity_columns())[0])
    assert 0 < found.n_tokens == of_tokens.pooled.n == page.n_tokens < every
