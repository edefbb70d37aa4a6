"""Where exact Gram matrices do not fit, an audit takes sketched ones: chosen by itself, told, marked, and as good."""

import json

import numpy as np
import pytest
import torch

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import audit_run
from otb_analysis.commands.cli import main
from otb_analysis.config import AttributionSchedule, AuditConfig, MeasureConfig, Schedule, SmallModelConfig
from otb_analysis.measurement import measurer as methods
from otb_analysis.measurement.measurer import DIM, gram_method
from otb_analysis.recorded.score import score
from otb_analysis.report.audit import audit_sections
from otb_analysis.rollouts.models import small_model
from otb_analysis.rollouts.sampling import Draft, collate
from otb_analysis.store import RunStore
from otb_analysis.tasks import Prompt

NEAR = 0.05


@pytest.fixture(scope="module")
def larger(tmp_path_factory, tokenizer):
    """A model with more weights than a sketch has buckets."""
    path = tmp_path_factory.mktemp("larger")
    torch.manual_seed(0)
    settings = SmallModelConfig(layers=2, width=64, heads=2, key_value_heads=2, feed_forward=192)
    model = small_model(settings, tokenizer)
    assert sum(p.numel() for p in model.parameters()) > DIM
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """16 prompts of 4 rollouts."""
    random = np.random.default_rng(2)
    rows = [
        {"prompt": f"{g}+{g}=", "completion": f"{random.integers(1000)}#", "reward": float(k % 2), "group": g}
        for g in range(16)
        for k in range(4)
    ]
    path = tmp_path_factory.mktemp("rows") / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def audited(rollouts, model, gram):
    config = AuditConfig(
        rollouts=rollouts, model=str(model), root=rollouts.parent / "runs", run=gram, if_exists="replace",
        measure=MeasureConfig(exact=Schedule(every=1), attribution=AttributionSchedule(every=0), gram=gram),
    )  # fmt: skip
    store = RunStore(score(config))
    return store, audit_run(RunAnswers(store))


@pytest.fixture(scope="module")
def exact(rollouts, larger):
    return audited(rollouts, larger, "exact")


def ratios(report):
    """Batch variances of all estimators over that of rloo."""
    variance = {row.key: row.values["variance"] for row in report.estimators.rows}
    return {label: value / variance["rloo", "none"] for label, value in variance.items()}


def largest_gap(sketched, exact):
    first, second = ratios(sketched), ratios(exact)
    assert first.keys() == second.keys() and len(first) > 30
    return max(abs(first[label] / second[label] - 1) for label in first)


@pytest.mark.slow
def test_sketched_variance_ratios_are_those_of_the_exact_matrix(rollouts, larger, exact):
    store, report = audited(rollouts, larger, "sketch")
    assert 0 < largest_gap(report, exact[1]) < NEAR
    assert report.sketches.buckets == DIM and 0 < report.sketches.error < NEAR
    assert (store.gradients_df()["sketch_dim"] == DIM).all()
    assert {gram.sketch_dim for gram in store.grams().values()} == {DIM}
    assert all(gram.sketch_dim == DIM for size in store.subgroup_grams().values() for gram in size.values())
    (section,) = (one for one in audit_sections(RunAnswers(store), report) if one.title == "Estimators")
    assert any("at 1 step " in str(part) and "65,536 buckets" in str(part) for part in section.parts)


def test_too_few_buckets_are_noticed(rollouts, larger, exact, monkeypatch):
    monkeypatch.setattr(methods, "DIM", 16)
    report = audited(rollouts, larger, "sketch")[1]
    assert largest_gap(report, exact[1]) > NEAR and report.sketches.error > NEAR


def test_exact_rows_are_not_marked(exact):
    store, report = exact
    assert report.sketches is None
    assert store.gradients_df()["sketch_dim"].isna().all() and store.grams()[0].sketch_dim is None


def cost_line(rollouts, model, capsys, *more):
    words = ["audit", "--model", str(model), "--rollouts", str(rollouts), "--root", str(rollouts.parent / "none")]
    assert main([*words, *more]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_cost_says_which_one_is_measured(rollouts, checkpoint, capsys, monkeypatch):
    assert "the Gram matrix is exact." in cost_line(rollouts, checkpoint, capsys)
    asked = cost_line(rollouts, checkpoint, capsys, "--measure.gram", "sketch")
    assert "the Gram matrix is sketched (65,536 buckets), because it was asked for." in asked
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 1 << 18)
    assert "because an exact one would hold" in cost_line(rollouts, checkpoint, capsys)


def test_an_audit_sketches_by_itself_where_memory_is_short(rollouts, checkpoint, monkeypatch):
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 1 << 18)
    report = audited(rollouts, checkpoint, "auto")[1]
    assert report.sketches is not None and report.sketches.steps == 1


def drawn(prompts, size, length):
    """Rollouts of one prompt token and `length` sampled ones."""
    drafts = []
    for _ in range(prompts * size):
        draft = Draft([1])
        draft.extend([2] * length, 0, [0.0] * length)
        drafts.append(draft)
    names = tuple(Prompt(str(p), "", "") for p in range(prompts))
    return collate(drafts, names, np.repeat(np.arange(prompts), size), 0)


def method(model, wanted="auto", prompts=2, length=4, processes=1):
    batch = drawn(prompts, 4, length)
    return gram_method(model, batch, np.ones(len(batch.group), bool), wanted, processes=processes)


def test_a_method_is_chosen_by_memory_and_by_rounds(tiny_model, monkeypatch):
    assert method(tiny_model).dim is None and method(tiny_model, "sketch").dim == DIM
    needed = method(tiny_model).memory
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 2 * needed)
    assert method(tiny_model).dim is None
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 2 * needed - 2)
    assert method(tiny_model).dim == DIM and "would hold" in method(tiny_model).reason
    assert method(tiny_model, "exact").dim is None  # whoever asks for it gets it
    monkeypatch.undo()
    monkeypatch.setattr(methods, "GRADIENT_BYTES", 4096)
    assert method(tiny_model).dim == DIM and "times as long" in method(tiny_model).reason


def test_signals_that_memory_does_not_hold_cost_rounds_of_passes_instead(tiny_model, monkeypatch):
    # 12 rows a prompt, 4 · 4 rollouts of 2,000 positions, 16 float32 each: 49 MB at a block's output and at its input,
    # 74 with those at the embedding, of 85 in all.
    whole = method(tiny_model, "exact", prompts=4, length=2000)
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 2 * whole.memory)
    assert method(tiny_model, prompts=4, length=2000) == whole
    costs = list[float]()
    for share in (1, 2, 3, 8):
        monkeypatch.setattr(methods, "memory_bytes", lambda device, share=share: 2 * whole.memory // share)
        exact = method(tiny_model, "exact", prompts=4, length=2000)
        assert share == 1 or exact.memory < whole.memory
        costs.append(exact.passes)
    base = methods.BASE * methods.read_once(drawn(4, 4, 2000), np.ones(16, bool))
    # 85, 42, 28 and 11 MB fit, and a bin holds half: 2, 3, 4 and 10 of them, each with every other one.
    np.testing.assert_allclose(np.diff(costs) / base, [1, 1, 6], atol=0.1)
    assert method(tiny_model, prompts=4, length=2000).reason  # so many rounds take longer than a sketch


def test_of_several_processes_each_holds_the_signals_of_its_own_prompts(tiny_model, monkeypatch):
    alone, shared = (method(tiny_model, prompts=4, length=2000, processes=n) for n in (1, 2))
    assert shared.memory < 0.6 * alone.memory and shared.passes == alone.passes
    assert shared == method(tiny_model, prompts=4, length=2000, processes=3)  # one of them has two prompts
    monkeypatch.setattr(methods, "memory_bytes", lambda device: 2 * shared.memory)
    assert method(tiny_model, "exact", prompts=4, length=2000).passes > alone.passes  # in rounds
    assert method(tiny_model, prompts=4, length=2000, processes=2) == shared


def test_exact_memory_grows_with_the_rollouts_and_sketched_with_prompts_alone(tiny_model):
    short, long = (method(tiny_model, "exact", length=length).memory for length in (4, 40))
    assert long > 1.2 * short
    assert method(tiny_model, "sketch", length=4).memory == method(tiny_model, "sketch", length=40).memory
    few, many = (method(tiny_model, "sketch", prompts=prompts).memory for prompts in (2, 8))
    assert many > few
