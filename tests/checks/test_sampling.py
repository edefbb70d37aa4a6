"""The sampling check: its sums beside a slow twin in float64, its verdict on planted faults and on clean tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

from benchmarks.sampling_check import noise, planted_rollouts, repetition, temperature, top_k, top_p
from otb_analysis.checks import sampling
from otb_analysis.checks.sampling import LEAK, PENALTIES, TEMPERATURES, TOP_P, SamplingCheck, repeats
from otb_analysis.checks.sampling_report import SUMS, SamplingSums, sampling_lines, sampling_report
from otb_analysis.config import ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import PolicyLogits, forward_statistics
from otb_analysis.measurement.table import token_table
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore
from otb_analysis.tasks import Prompt

TAU = 0.8


@pytest.fixture(scope="module")
def policy(checkpoint):
    from otb_analysis.rollouts.models import load_policy

    return load_policy(checkpoint)


def draw(policy, change=None, prompts=4, size=4, tokens=12, seed=0):
    torch.manual_seed(seed)
    texts = [Prompt(str(g), f"{g}{seed % 10}+1=", "") for g in range(prompts)]
    model, tokenizer = policy
    return planted_rollouts(model, tokenizer, texts, size, tokens, change)


def sums_of(model, rollouts, check=None, tau=1.0, size=0):
    check = check or SamplingCheck()
    forward = forward_statistics(model, rollouts, tau, size, check.observe)
    return check.rows(rollouts, token_table(rollouts, forward, None))


@torch.no_grad()
def slow_logits(model, rollouts):
    """Each policy token's context, drawn token, recorded log-probability and float64 logits, one forward pass each."""
    for n, row in enumerate(rollouts.input_ids):
        logits = model(input_ids=torch.as_tensor(row[None]), use_cache=False).logits[0].double().numpy()
        for k in np.flatnonzero(rollouts.mask[n]):
            yield row[:k], int(row[k]), rollouts.behavior_logprob[n, k], logits[k - 1]


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def penalised(z, context, penalty):
    changed = z.copy()
    for v in set(context.tolist()):
        changed[v] = z[v] / penalty if z[v] > 0 else z[v] * penalty
    return changed


def slow_sums(model, rollouts):
    """Σ log p(y) − log π(y) and Σ(recorded − log p(y))² by test and setting, and the score tests, written out."""
    gain, residual, score, variance, third, fourth, outside, expected = ({} for _ in range(8))

    def add(where, key, value):
        where[key] = where.get(key, 0.0) + value

    for context, y, recorded, raw in slow_logits(model, rollouts):
        z = raw / TAU
        log_pi = log_softmax(z)
        pi = np.exp(log_pi)
        scores = {"temperature": log_pi, "probability": pi}
        # the penalty's derivative at 1, by a central difference
        step = 1e-5
        up, down = (log_softmax(penalised(raw, context, 1 + h) / TAU) for h in (step, -step))
        scores["repetition"] = (up - down) / (2 * step)
        for name, a in scores.items():
            mean = (pi * a).sum()
            add(score, name, a[y] - mean)
            add(variance, name, (pi * (a - mean) ** 2).sum())
            add(third, name, (pi * (a - mean) ** 3).sum())
            add(fourth, name, (pi * (a - mean) ** 4).sum())
        for t in TEMPERATURES:
            add_setting = log_softmax(z / t)[y]
            add(gain, ("temperature", t), add_setting - log_pi[y])
            add(residual, ("temperature", t), (recorded - add_setting) ** 2)
        for penalty in PENALTIES:
            logprob = log_softmax(penalised(raw, context, penalty) / TAU)[y]
            add(gain, ("repetition", penalty), logprob - log_pi[y])
            add(residual, ("repetition", penalty), (recorded - logprob) ** 2)
        order = np.argsort(-pi)
        for p in TOP_P:
            kept = order[: int((np.cumsum(pi[order]) < p).sum()) + 1]
            mass = pi[kept].sum()
            add(outside, ("top_p", p), float(y not in kept))
            add(expected, ("top_p", p), 1 - mass)
            add(gain, ("top_p", p), np.log((1 - LEAK) / mass + LEAK) if y in kept else np.log(LEAK))
        for k in (1, 3, 8):
            kept = order[:k]
            add(outside, ("top_k", k), float(y not in kept))
            add(expected, ("top_k", k), 1 - pi[kept].sum())
    return gain, residual, score, variance, third, fourth, outside, expected


def test_sums_are_those_of_every_sampler_written_out(policy):
    rollouts = draw(policy, temperature(0.7))
    model = policy[0]
    found = SamplingSums.from_rows(sums_of(model, rollouts, tau=TAU, size=3))
    gain, residual, score, variance, third, fourth, outside, expected = slow_sums(model, rollouts)
    for (test, setting), value in gain.items():
        assert found.grid(test, "gain")[setting] == pytest.approx(value, rel=1e-5, abs=1e-4), (test, setting)
    for (test, setting), value in residual.items():
        assert found.grid(test, "residual_sq")[setting] == pytest.approx(value, rel=1e-4), (test, setting)
    for test, value in score.items():
        assert found.total(test, "score") == pytest.approx(value, rel=1e-4, abs=1e-4), test
        assert found.total(test, "variance") == pytest.approx(variance[test], rel=1e-5), test
        assert found.total(f"{test}^3", "score") == pytest.approx(third[test], rel=1e-3, abs=1e-4), test
        assert found.total(f"{test}^4", "score") == pytest.approx(fourth[test], rel=1e-3, abs=1e-4), test
    for (test, setting), value in outside.items():
        assert found.grid(test, "observed")[setting] == value
        mean = found.grid(test, "observed")[setting] - found.grid(test, "score")[setting]
        assert mean == pytest.approx(expected[test, setting], abs=1e-4)


def test_the_step_does_not_depend_on_its_passes_but_for_what_was_learned(policy):
    rollouts = draw(policy)
    whole, parts = (SamplingSums.from_rows(sums_of(policy[0], rollouts, size=size)) for size in (0, 3))
    same = [i for i, test in enumerate(whole.test) if "other_weights" not in test]
    for name in ("n_tokens", "score", "variance", "gain"):
        order = [np.lexsort((s.position[same], s.parameter[same], s.test[same])) for s in (whole, parts)]
        a, b = (s.sums[name][same][o] for s, o in zip((whole, parts), order, strict=True))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_both_z_scores_are_those_of_the_steps_table_and_positions_add_up(policy):
    from otb_analysis.measurement.measurer import sampling_check

    rollouts = draw(policy, temperature(1.5))
    check = SamplingCheck()
    forward = forward_statistics(policy[0], rollouts, 1.0, 0, check.observe)
    table = token_table(rollouts, forward, None)
    rows = {**check.rows(rollouts, table)}
    report = sampling_report(rows | {"step": [7] * len(np.asarray(rows["test"]))})
    known = sampling_check(table.stats, table.mask)
    (step,) = report.by_step
    assert (step.at, step.n_tokens) == (7, int(table.mask.sum()))
    assert step.temperature == pytest.approx(known["certificate_logprob_z"], abs=1e-4)
    assert step.probability == pytest.approx(known["certificate_prob_z"], abs=1e-4)
    assert sum(one.n_tokens for one in report.by_position) == step.n_tokens
    assert [one.at for one in report.by_position] == [0, 1, 2, 4, 8]


@pytest.mark.parametrize("every, first", [(3, 0), (3, 2), (1000, 7)])
def test_a_check_of_every_kth_token_is_that_of_the_others_masked(policy, every, first):
    """Of two steps, so that the learned direction has something to say at the second."""
    some, whole = SamplingCheck(every, first), SamplingCheck()
    for seed in (0, 1):
        rollouts = draw(policy, temperature(1.5), seed=seed)
        at = np.arange(rollouts.mask.shape[1]) - rollouts.prompt_length[:, None]
        masked = replace(rollouts, mask=rollouts.mask & (at % every == first) & (at >= 0))
        sums = []
        for check, these in ((some, rollouts), (whole, masked)):
            rows = sums_of(policy[0], these, check)
            keys = zip(rows["test"], rows["parameter"], rows["position"], strict=True)
            sums.append({key: [rows[name][n] for name in SUMS] for n, key in enumerate(keys) if key[0] != "repeated"})
        assert set(sums[0]) == set(sums[1]) and len(sums[0]) > 40
        for key, values in sums[0].items():
            assert [x for x in values if x is not None] == pytest.approx(
                [x for x in sums[1][key] if x is not None], rel=1e-4, abs=1e-5
            )


def joined(steps):
    return {name: [x for rows in steps for x in rows[name]] for name in steps[0]}


def audited(policy, change, steps=3, recorded=True, scoring=None, tokens=24, size=48):
    check, columns = SamplingCheck(), []
    for step in range(steps):
        rollouts = draw(policy, change, prompts=4, size=size, tokens=tokens, seed=step)
        if not recorded:
            rollouts = replace(rollouts, behavior_logprob=np.full_like(rollouts.behavior_logprob, np.nan))
        rows = sums_of(scoring or policy[0], rollouts, check)
        columns.append(rows | {"step": [step] * len(np.asarray(rows["test"]))})
    return sampling_report(joined(columns))


FAULTS = {
    "temperature": temperature(0.8),
    "top_p": top_p(0.95),
    "top_k": top_k(5),
    "repetition": repetition(1.3),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("cause", FAULTS)
def test_a_planted_fault_is_found_and_named(policy, cause, recorded):
    report = audited(policy, FAULTS[cause], recorded=recorded)
    assert report.alarm and report.causes == (cause,) and report.z > 5
    assert report.from_recorded == recorded
    setting = report.families[cause].setting
    assert setting == pytest.approx({"temperature": 0.8, "top_p": 0.95, "top_k": 5, "repetition": 1.3}[cause], rel=0.1)
    assert "not drawn by the stated sampler" in sampling_lines(report)[0]


def test_noise_is_named_by_recorded_log_probabilities_with_its_size(policy):
    report = audited(policy, noise(0.3))
    assert report.causes == ("noise",) and report.z > 5
    assert report.recorded is not None and report.recorded.noise == pytest.approx(0.3, rel=0.05)
    assert report.recorded.alike is not None and report.recorded.alike < 0.3


def other_weights(model, scale=0.02):
    import copy

    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.mark.parametrize("recorded", [False, True])
def test_other_weights_are_named(policy, recorded):
    report = audited(policy, None, recorded=recorded, scoring=other_weights(policy[0], 0.05))
    assert report.alarm and report.causes == ("other_weights",), report.families
    if recorded:
        assert report.recorded is not None and report.recorded.alike == pytest.approx(1.0, abs=1e-3)


def test_tokens_of_the_model_raise_no_alarm_and_have_no_mismatch(policy):
    report = audited(policy, None)
    assert not report.alarm and report.causes == ()
    assert report.recorded is not None and report.recorded.over_float32 == 0
    assert "fit the model at the stated temperature" in sampling_lines(report)[0]


@torch.no_grad()
def raw_logprobs(model, rollouts):
    """Rollouts whose sampler recorded log-probabilities of temperature 1, whatever it drew at."""
    ids = torch.as_tensor(rollouts.input_ids)
    logprob = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    recorded = np.where(rollouts.mask[:, 1:], logprob.double().numpy(), np.nan)
    return replace(rollouts, behavior_logprob=np.pad(recorded, ((0, 0), (1, 0)), constant_values=np.nan))


def test_clean_tokens_with_log_probabilities_of_before_the_temperature_have_those_named(policy):
    rollouts = draw(policy, temperature(0.6), size=48, tokens=24)
    processed = sampling_report(sums_of(policy[0], rollouts, tau=0.6))
    assert not processed.alarm and not any("are those of" in line for line in sampling_lines(processed, 0.6))
    report = sampling_report(sums_of(policy[0], raw_logprobs(policy[0], rollouts), tau=0.6))
    assert not report.alarm and report.recorded is not None and report.recorded.explained_by == ("temperature",)
    assert report.recorded.left["temperature"][0] == pytest.approx(1 / 0.6, rel=0.01)
    line = sampling_lines(report, 0.6)[1]
    assert "are those of temperature 1.6" in line and "(temperature 1)" in line
    assert "(temperature 1)" not in sampling_lines(report, 0.9)[1]


def test_log_probabilities_of_after_top_p_are_named_beside_its_alarm(policy):
    report = sampling_report(sums_of(policy[0], draw(policy, top_p(0.8), size=48, tokens=24)))
    assert "Likely cause: top-p of about 0.8" in sampling_lines(report)[0]
    assert "are those of top-p of about 0.8, which explains" in sampling_lines(report)[1]


@pytest.mark.slow
def test_clean_audits_seldom_raise_an_alarm(policy):
    alarms = 0
    for seed in range(60):
        check = SamplingCheck()
        steps = [sums_of(policy[0], draw(policy, size=16, seed=100 * seed + s), check) for s in range(2)]
        alarms += sampling_report(joined(steps)).alarm
    assert alarms <= 4  # 60 at a nominal 1 %: P(more) < 0.001


def test_repeats_tell_weights_from_noise():
    rows = [[1, 2], [1, 2], [1, 3], [1, 2]]
    same = repeats([0, 0, 0, 1], rows, [[0.5, -1.0], [0.5, -1.0], [0.5, 9.0], [7.0, 7.0]])
    # prefix (1): three of .5; prefix (1, 2): two of −1; (1, 3) and the other group's are alone
    assert same == (5, pytest.approx(2.75), pytest.approx(2.75))
    _, agree, total = repeats([0, 0], rows[:2], [[1.0, 2.0], [-1.0, -2.0]])
    assert agree / total == pytest.approx(-1.0)


def test_a_vocabulary_too_large_to_sort_keeps_a_bin_more(monkeypatch):
    log_pi = (2 * torch.randn(400, 300, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    y = torch.multinomial(log_pi.exp(), 1, generator=torch.Generator().manual_seed(1))
    whole = sampling.truncation_tests(log_pi, y)
    monkeypatch.setattr(sampling, "MOST_SORTED", 20)
    for a, b in zip(whole, sampling.truncation_tests(log_pi, y), strict=True):
        (seen, score, _), (binned_seen, binned_score, variance) = ((t.observed, t.score, t.variance) for t in (a, b))
        assert seen is not None and binned_seen is not None and score is not None and binned_score is not None
        assert variance is not None and (binned_seen <= seen).all()
        outside, binned = seen - score, binned_seen - binned_score  # mass outside
        assert (binned <= outside + 1e-6).all() and float((outside - binned).mean()) < 0.005
        assert float(binned_score.sum()) == pytest.approx(0.0, abs=4 * float(variance.sum()) ** 0.5)


def test_a_run_without_the_check_says_which_command_adds_it():
    with pytest.raises(InputError, match=r"no sampling check; .*--model"):
        sampling_report({"test": []})


def test_logits_are_shown_once_per_policy_token(policy):
    rollouts, seen = draw(policy), []
    forward_statistics(policy[0], rollouts, 1.0, 2, seen.append)
    assert all(isinstance(part, PolicyLogits) for part in seen)
    assert sum(len(part.targets) for part in seen) == rollouts.mask.sum()


def test_a_scored_run_holds_the_check_step_by_step(tmp_path, checkpoint, jsonl, policy):
    rollouts = draw(policy, prompts=4, size=4)
    rows = [
        {
            "prompt": rollouts.prompts[g].text, "completion": policy[1].decode(rollouts.input_ids[n][inside]),
            "reward": float(n % 2), "group": int(g), "step": int(g) // 2,
            "ids": rollouts.input_ids[n][inside].tolist(),
        }
        for n, g in enumerate(rollouts.group) for inside in [rollouts.mask[n]]
    ]  # fmt: skip
    config = ScoreConfig(rollouts=jsonl(rows), model=str(checkpoint), root=tmp_path / "runs")
    store = RunStore(score(config))
    report = sampling_report(store.frame("sampling"))
    steps = store.steps_df()
    assert [one.at for one in report.by_step] == [0, 1] and report.recorded is None
    assert report.n_tokens == steps["n_tokens"].sum()
    found = [float(one.probability or 0) for one in report.by_step]
    np.testing.assert_allclose(found, steps["certificate_prob_z"].to_numpy(float), atol=1e-4)


def by_hand(*rows):
    """Rows of the table `sampling` from (test, setting, score, variance, gain)."""
    names = ("test", "parameter", "score", "variance", "gain")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    nothing = [None] * len(rows)
    return columns | {
        "n_tokens": [1000] * len(rows),
        "observed": nothing,
        "residual_sq": nothing,
        "position": [0] * len(rows),
    }


def test_causes_that_explain_alike_are_all_named():
    rows = by_hand(
        ("temperature", None, -8.0, 4.0, None), ("temperature", 1.2, None, None, 7.5),
        ("probability", None, -8.0, 4.0, None), ("noise", 0.5, None, None, 8.5),
        ("repetition", None, 0.1, 4.0, None), ("repetition", 1.05, None, None, 0.5),
        ("other_weights", None, 0.0, 4.0, None),
    )  # fmt: skip
    report = sampling_report(rows)
    assert report.z == pytest.approx(4.0) and report.causes == ("temperature", "noise")
    # −8/√4 = −4: two-sided p = 6.3e−5, times six families
    assert np.exp(report.log_p) == pytest.approx(6 * 6.334e-5, rel=1e-3)
    assert sampling_lines(report)[0].endswith("; cannot be told apart here.")


def test_a_z_of_three_is_no_alarm_among_six_families():
    rows = by_hand(
        ("temperature", None, 6.0, 4.0, None), ("temperature", 0.9, None, None, 4.0),
        ("probability", None, 0.0, 4.0, None), ("noise", 0.5, None, None, -1.0),
        ("repetition", None, 0.0, 4.0, None), ("repetition", 1.05, None, None, -1.0),
        ("other_weights", None, 0.0, 4.0, None),
    )  # fmt: skip
    report = sampling_report(rows)
    assert not report.alarm and np.exp(report.log_p) == pytest.approx(6 * 0.0027, rel=1e-3)


def moments_of(p, jump):
    """Sums of the second to the fourth central moments of tokens that have `jump` with the chances p, else 0."""
    q = 1 - p
    return [(p * q).sum() * jump**2, (p * q * (q - p)).sum() * jump**3, (p * q * (q**3 + p**3)).sum() * jump**4]


@pytest.mark.parametrize("jump", [-1.0, -8.0, 0.3])
@pytest.mark.parametrize("chance", [4e-4, 2e-3, 0.02, 0.3])
def test_a_family_whose_variance_few_tokens_carry_is_judged_as_rare_events_are(jump, chance):
    # 400 tokens, each of which has the statistic `jump` with a small chance that differs from token to token.
    rng, trials = np.random.default_rng(1), 40_000
    p = np.clip(chance * rng.uniform(0.5, 1.5, 400), 0, 0.5)
    events = rng.poisson(p.sum(), trials) if chance < 0.01 else (rng.random((trials, 400), np.float32) < p).sum(axis=1)
    moments = moments_of(p, jump)
    values, counts = np.unique(events, return_counts=True)
    found = np.array([tail_of((k - p.sum()) * jump, *moments) for k in values])
    for alpha in (0.05, 0.01, 0.001):
        assert counts[found < alpha].sum() / trials <= 1.2 * alpha + 1e-4, alpha
    plain = np.array([2 * ndtr(-abs(k - p.sum()) * abs(jump) / moments[0] ** 0.5) for k in values])
    if chance < 0.01:  # what was said before: many times too often
        assert counts[plain < 0.001].sum() / trials > 0.005
    if chance == 0.3:  # and where events are many, the same as before
        np.testing.assert_allclose(ndtri(found / 2)[plain > 1e-4], ndtri(plain / 2)[plain > 1e-4], atol=0.2)


@pytest.mark.parametrize(("size", "rate"), [(5.0, 0.01), (8.0, 0.003), (12.0, 0.001), (3.0, 2.0)])
def test_rare_large_events_among_many_small_ones_are_judged_by_their_own_size(size, rate):
    # A sum of variance 1 from many tokens, and now and then one that moves it by many of its standard deviations.
    moments = 1 + rate * size**2, rate * size**3, rate * size**4
    for at in np.linspace(2.5, 3 * size, 25):
        k = np.arange(60)
        log_poisson = k * np.log(rate) - rate - np.cumsum(np.log(np.maximum(k, 1)))
        true = 2 * (np.exp(log_poisson) * ndtr(-(at - size * (k - rate)))).sum()
        assert true * 0.99 <= tail_of(at, *moments) <= max(4 * true, 1e-12)


def tail_of(score, variance, third, fourth):
    rows = by_hand(
        ("temperature", None, 0.0, 4.0, None), ("temperature", 0.9, None, None, 0.0),
        ("probability", None, 0.0, 4.0, None), ("noise", 0.5, None, None, 0.0),
        ("repetition", None, score, variance, None), ("repetition^3", None, third, None, None),
        ("repetition^4", None, fourth, None, None),
        ("repetition", 1.05, None, None, 0.0), ("other_weights", None, 0.0, 4.0, None),
    )  # fmt: skip
    return float(np.exp(sampling_report(rows).families["repetition"].log_p))


@pytest.mark.parametrize(("score", "third"), [(-900.0, -300.0), (-9e7, -300.0), (900.0, -300.0), (900.0, 1e-12)])
def test_a_z_that_no_number_can_hold_still_has_a_finite_logarithm(score, third):
    rows = by_hand(
        ("temperature", None, score, 100.0, None), ("temperature^3", None, third, None, None),
        ("temperature^4", None, 900.0, None, None),
        ("temperature", 0.9, None, None, 0.0), ("probability", None, 0.0, 4.0, None), ("noise", 0.5, None, None, 0.0),
        ("repetition", None, 0.0, 4.0, None), ("repetition", 1.05, None, None, 0.0),
        ("other_weights", None, -400.0, 4.0, None),
    )  # fmt: skip
    report = sampling_report(rows)
    assert report.alarm and np.isfinite(report.log_p) and np.isfinite(report.z) and report.z > 10
