"""Gradients of smaller groups at an exact step: as if only those rollouts had been sampled, on disk and in answers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.answers import RunAnswers
from otb_analysis.config import MeasureConfig, SampleConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.gradients import group_gradient_gram
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.training.check import check

FOURS = SampleConfig(prompts=3, group_size=4, max_new_tokens=6)


@pytest.fixture
def step(made):
    """Three groups of four rollouts with their table, and an measurer that measures them all."""
    trainer = made(sample=FOURS)
    torch.manual_seed(3)
    prompts = [trainer.task.prompt("train", i) for i in range(3)]
    with trainer.policy.sampling():
        rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, FOURS)
    forward = trainer.policy.forward(rollouts, keep_graph=False)
    table = trainer.table(compute_rewards(trainer.task, rollouts), forward, None)
    return trainer, rollouts, table


def test_smaller_groups_are_as_if_only_their_rollouts_had_been_sampled(step):
    trainer, rollouts, table = step
    measurer, groups = trainer.measurer, np.arange(3)
    norms = measurer.norms(rollouts, groups)
    found = measurer.subgroups(rollouts, table, norms, groups)
    assert list(found) == [2] and found[2].n_rollouts == 12
    assert found[2].labels == (("rloo", "none"), ("otb", "proxy"), ("otb", "exact"))
    energies = {"none": table.stats.energy, "proxy": table.stats.energy, "exact": norms.norm_sq}
    halves = [np.flatnonzero(rollouts.group == p).reshape(2, 2) for p in range(3)]
    gradients = {}
    for label in found[2].labels:
        weights = np.zeros(table.mask.shape)
        for half in np.concatenate(halves):
            rows = np.isin(np.arange(12), half)
            alone = table.inputs(energies[label[1]])
            given = {name: getattr(alone, name) for name in ("reward", "mask", "group", "energy")}
            weights[rows] = estimate(label[0], type(alone)(**{n: x[rows] for n, x in given.items()})).advantage / 2
        gradients[label] = weights
    ids, mask, attention = rollouts.tensors(trainer.model.device)
    numbered = np.empty(12, dtype=int)
    for a, half in enumerate(np.concatenate(halves)):
        numbered[half] = a
    rows = rollouts.by_column(np.stack(list(gradients.values())))
    inner = group_gradient_gram(trainer.model, ids, mask, rows, numbered, attention, engine="reference")
    for m in range(3):
        for n in range(3):
            for p in range(3):
                for q in range(3):
                    block = inner[m, n, 2 * p : 2 * p + 2, 2 * q : 2 * q + 2]
                    expected = np.trace(block) / 2 if p == q else block.mean()
                    assert found[2].inner[m, n, p, q] == pytest.approx(expected, rel=2e-3, abs=1e-4)


def test_only_named_estimators_the_reference_and_the_trained_one_are_measured(step):
    trainer, rollouts, table = step
    config = replace(trainer.config.measure, subgroups=("group_mean",))
    measurer = GradientMeasurer(trainer.model, config, 1.0, {"otb_loo": None})
    norms = measurer.norms(rollouts, np.arange(3))
    (found,) = measurer.subgroups(rollouts, table, norms, np.arange(3)).values()
    assert {name for name, _ in found.labels} == {"rloo", "group_mean", "otb_loo"}


def test_smaller_groups_come_back_from_disk_and_the_planner_compares_them(trained):
    run = trained("fours", sample=FOURS)
    store = RunStore(run)
    by_size = store.subgroup_grams()
    assert list(by_size) == [2] and list(by_size[2]) == [0, 1, 2]
    whole, small = store.grams()[0], by_size[2][0]
    assert (small.groups.tolist(), small.prompt) == (whole.groups.tolist(), whole.prompt)
    planner = RunAnswers(store).planner
    assert planner.n_rollouts == 12
    assert {cell.size for cell in planner.cells if cell.estimator == "otb"} == {2, 4}
    assert (run / "subgroups.parquet").is_file()


def test_run_without_smaller_groups_reads_as_such_and_says_why(trained):
    # Groups of 3 cannot be halved.
    store = RunStore(trained("otb"))
    assert store.subgroup_grams() == {}
    assert store.sql("select * from subgroups").empty
    planner = RunAnswers(store).planner
    assert planner.cells == () and "one size that can be halved" in planner.note


def test_turned_off_nothing_is_measured(step):
    trainer, rollouts, table = step
    config = MeasureConfig(exact=Schedule(1, 0), subgroups=())
    found = GradientMeasurer(trainer.model, config, 1.0).measure(
        0, rollouts, table, None, lambda: np.zeros(table.mask.shape)
    )
    assert found.gram is not None and not found.subgroups and found.gaps == 0


def test_failure_is_a_gap_that_leaves_the_rest(step, monkeypatch):
    trainer, rollouts, table = step

    def fail(*args):
        raise RuntimeError("the knife is blunt")

    monkeypatch.setattr(trainer.measurer, "subgroups", fail)
    with pytest.warns(RuntimeWarning, match="step 0 failed .* knife is blunt"):
        found = trainer.measurer.measure(0, rollouts, table, None, lambda: np.zeros(table.mask.shape))
    assert found.gaps == 1 and found.statistics and not found.subgroups


def test_unknown_estimator_is_named_before_the_run_begins(tiny_config, tmp_path):
    config = replace(tiny_config, root=tmp_path, measure=replace(tiny_config.measure, subgroups=("otbb",)))
    with pytest.raises(InputError, match="'otbb'"):
        check(config)
