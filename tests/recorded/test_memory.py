"""An audit's memory: a step of the file at a time, and micro-batches of a step, however long the file is."""

import gc
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers import holders
from otb_analysis.config import AttributionSchedule, AuditConfig, MeasureConfig, Schedule
from otb_analysis.gradients.batch import inputs
from otb_analysis.recorded.records import RecordedRollout
from otb_analysis.recorded.score import Scorer, score
from otb_analysis.rollouts import models
from otb_analysis.store import RunStore, RunWriter

GROUPS, SIZE, STEPS, LONGER = 4, 4, 1, 16
GROWTH = 1.5
"""Most that peaks may differ by where the file is 16 times as long: garbage that waits to be collected."""


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """Write a file of so many steps of 16 rollouts with 31 tokens."""
    folder = tmp_path_factory.mktemp("files")

    def write(steps):
        random = np.random.default_rng(0)
        path = folder / f"steps{steps}.jsonl"
        if not path.exists():
            rows = [
                {
                    "prompt": f"{step}+{g}=", "completion": "".join(random.choice(list("0123456789+"), 30)) + "#",
                    "reward": float(k % 2), "group": g, "step": step,
                }
                for step in range(steps) for g in range(GROUPS) for k in range(SIZE)
            ]  # fmt: skip
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    return write


def config(rollouts, checkpoint, exact=0, **more):
    measure = MeasureConfig(exact=Schedule(every=exact), attribution=AttributionSchedule(every=1), **more)
    root = rollouts.parent / "runs"
    return AuditConfig(
        rollouts=rollouts, model=str(checkpoint), root=root, run=rollouts.stem, if_exists="replace", measure=measure
    )


def peak(run):
    """Return a call's most traced bytes beyond what was held before."""
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.heavy
def test_scoring_holds_one_step_whatever_the_files_length(file_of, checkpoint, monkeypatch):
    one, many = (config(file_of(steps), checkpoint) for steps in (STEPS, STEPS * LONGER))
    score(one)  # what is loaded and cached once
    short, long = peak(lambda: score(one)), peak(lambda: score(many))
    assert long < GROWTH * short
    kept, write = [], RunWriter.write_step

    def keeping(self, step, tables):
        kept.append(tables)
        write(self, step, tables)

    monkeypatch.setattr(RunWriter, "write_step", keeping)  # the bound notices who keeps every step
    assert peak(lambda: score(many)) > GROWTH * short


def test_records_are_alive_for_one_step_only(file_of, checkpoint, monkeypatch):
    alive, tables = [], Scorer.tables

    def counting(self, step):
        gc.collect()
        alive.append(sum(type(one) is RecordedRollout for one in gc.get_objects()))
        return tables(self, step)

    monkeypatch.setattr(Scorer, "tables", counting)
    score(config(file_of(4), checkpoint))
    assert len(alive) == 4
    # A step, the record behind it that says where it ends, and the first one that others must be like.
    assert min(alive) >= GROUPS * SIZE and max(alive) <= GROUPS * SIZE + 2


def test_reports_read_a_few_steps_at_a_time(file_of, checkpoint, monkeypatch):
    monkeypatch.setattr(holders, "AT_ONCE", 1)
    stores = [RunStore(score(config(file_of(steps), checkpoint))) for steps in (STEPS, STEPS * LONGER)]
    tokens = [holders.attributed_tokens(store) for store in stores][1].n_tokens
    short, long = (peak(lambda store=store: holders.attributed_tokens(store)) for store in stores)
    kept = 4 * 8 * tokens  # a number of each token: of each step, of all, sorted, and added up
    assert long - short < kept
    monkeypatch.setattr(holders, "AT_ONCE", LONGER)
    assert peak(lambda: holders.attributed_tokens(stores[1])) - short > kept  # all steps at once are noticed


@pytest.mark.parametrize("gram", ["exact", "sketch"])
def test_passes_are_micro_batches_whatever_the_steps_size(file_of, checkpoint, monkeypatch, gram):
    """Forward passes of scoring have `micro_batch` rollouts, those of gradients `BATCH_POSITIONS` positions or a group.

    The exact Gram matrix passes a prompt's rollouts at once, with the prompt read once.
    """
    monkeypatch.setattr(inputs, "BATCH_POSITIONS", 80)
    largest = []
    load = models.load_policy

    def loading(*args):
        model, tokenizer = load(*args)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: largest.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        return model, tokenizer

    monkeypatch.setattr("otb_analysis.recorded.score.load_policy", loading)
    score(replace(config(file_of(1), checkpoint, exact=1, gram=gram), micro_batch=SIZE))
    group, step = SIZE * 36, GROUPS * SIZE * 36
    assert largest and max(largest) <= max(80, group) < step / 2
