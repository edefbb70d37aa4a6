"""Runs that measure too few prompts, or whose answers have no room to end, are told so with the remedy."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from otb_analysis.commands.cli import from_toml
from otb_analysis.config import (
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.phases import NOTES
from otb_analysis.tasks import make_task
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.check import too_few_prompts
from otb_analysis.training.loop import train

ROOT = Path(__file__).parents[2]


def told(steps=60, prompts=16, every=20, measured=2, task=None):
    config = TrainConfig(
        optimize=OptimizeConfig(steps=steps),
        sample=SampleConfig(prompts=prompts),
        measure=MeasureConfig(exact=Schedule(every=every, prompts=measured)),
    )
    return too_few_prompts(config, task or make_task(config))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {},
            "this run will measure 6 different prompts at 3 steps; an interval takes 16: --measure.exact.prompts 6.",
        ),
        (
            {"prompts": 4, "measured": 0},
            "this run will measure 12 different prompts at 3 steps; an interval takes 16: --measure.exact.every 19 "
            "--measure.exact.prompts 4.",
        ),
        (
            {"steps": 2, "prompts": 4, "every": 1, "measured": 0},
            "this run will measure 8 different prompts at 2 steps; an interval takes 16: --optimize.steps 4 "
            "--measure.exact.every 1 --measure.exact.prompts 4.",
        ),
        (
            {"steps": 1},
            "this run will measure 2 different prompts at 1 step; an interval takes 16: --measure.exact.prompts 16.",
        ),
    ],
)
def test_run_that_measures_too_few_prompts_is_told_what_mends_it(settings, sentence):
    assert told(**settings) == sentence


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, {"measured": 6}),
        ({"prompts": 4, "measured": 0}, {"every": 19, "measured": 4}),
        ({"steps": 2, "prompts": 4, "every": 1, "measured": 0}, {"steps": 4, "every": 1, "measured": 4}),
        ({"steps": 1}, {"measured": 16}),
    ],
)
def test_remedy_mends_it(settings, remedy):
    assert told(**settings) != ""
    assert told(**(settings | remedy)) == ""


@pytest.mark.parametrize("settings", [{"every": 0}, {"measured": 0}, {"measured": 8}])
def test_run_that_measures_enough_or_nothing_is_told_nothing(settings):
    assert told(**settings) == ""


class Few:
    """Ten prompts, again and again."""

    name = "few"

    def __init__(self, config=None):
        self.inner = make_task(TrainConfig())

    def prompt(self, split, index):
        return self.inner.prompt(split, index % 10)


def test_repeated_prompts_count_once():
    assert told(measured=0, task=Few()) == (
        "this run will measure 10 different prompts at 3 steps; an interval takes 16: take a task with more prompts."
    )


def documented():
    """Every configuration that the documents show: whole files, and blocks that name the level."""
    found = {"default": TrainConfig()}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            if "optimize" in tomllib.loads(block) or "measure" in tomllib.loads(block):
                found[f"{page.name} {number}"] = block
    for file in sorted((ROOT / "docs").glob("*.toml")):
        found[file.name] = file.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("name", documented())
def test_default_and_every_documented_configuration_measures_enough_prompts(name, tmp_path):
    config = documented()[name]
    if isinstance(config, str):
        (tmp_path / "run.toml").write_text(config, encoding="utf-8")
        config = from_toml(TrainConfig, tmp_path / "run.toml")
    assert config.measure.exact.every > 0
    assert too_few_prompts(config, make_task(config)) == ""


def test_default_measures_enough_also_in_a_run_of_two_thirds_its_length():
    assert too_few_prompts(replace(TrainConfig(), optimize=OptimizeConfig(steps=40)), make_task(TrainConfig())) == ""


def test_held_out_prompts_are_all_different_and_no_more_than_there_are():
    found = distinct_prompts(Few(), "heldout", 128)
    assert len(found) == len({prompt.id for prompt in found}) == 10
    assert found == [Few().prompt("heldout", index) for index in range(10)]


def test_enough_held_out_prompts_are_the_first_ones():
    task = make_task(TrainConfig())
    assert distinct_prompts(task, "heldout", 20) == [task.prompt("heldout", index) for index in range(20)]


def test_run_is_evaluated_on_what_there_is_and_says_so_once(tiny_config, tmp_path, monkeypatch, one_thread):
    from otb_analysis.tasks import TASKS
    from otb_analysis.training import loop

    class FewHalf(TASKS["half"]):
        def prompt(self, split, index):
            return super().prompt(split, index % 5 if split == "heldout" else index)

    sampled, sample = [], loop.sample

    heldout = {FewHalf(tiny_config).prompt("heldout", index).id for index in range(5)}

    def watched(generator, tokenizer, task, prompts, *rest):
        if prompts[0].id in heldout:
            sampled.append([prompt.id for prompt in prompts])
        return sample(generator, tokenizer, task, prompts, *rest)

    monkeypatch.setitem(TASKS, "half", FewHalf)
    monkeypatch.setattr(loop, "sample", watched)
    NOTES.clear()
    train(replace(tiny_config, root=tmp_path, evaluate=EvaluateConfig(every=1, prompts=8, samples=2)))
    assert [len(set(ids)) for ids in sampled] == [len(ids) for ids in sampled] == [5, 5, 5]
    sentences = [note for note in NOTES if "held-out" in note]
    assert sentences == [
        "the held-out split of half has 5 different prompts, so the run is evaluated on these and not on 8 "
        "(evaluate.prompts)."
    ]


@pytest.mark.parametrize("budget", [1, 60])
def test_answers_that_all_end_at_the_budget_are_named_once(tiny_config, budget, tmp_path, one_thread):
    NOTES.clear()
    sample = replace(tiny_config.sample, max_new_tokens=budget)
    train(replace(tiny_config, root=tmp_path, sample=sample, measure=MeasureConfig(exact=Schedule())))
    named = [note for note in NOTES if "max_new_tokens" in note]
    if budget == 60:  # an untrained model ends one of twelve answers within sixty tokens
        assert named == []
    else:
        assert len(named) == 1
        assert named[0].startswith("all 12 answers of step ")
        assert "end at max_new_tokens = 1, " in named[0] and named[0].endswith("raise --sample.max-new-tokens.")
