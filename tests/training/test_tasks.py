"""Every task of the catalogue, and one's own, from nothing to a trained model, in seconds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.config import (
    CalculatorConfig,
    CountingConfig,
    CriticConfig,
    EvaluateConfig,
    GraphPathConfig,
    MathJsonlConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore
from otb_analysis.training import loop, warm_start
from otb_analysis.training.warm_start import warm_started

FILE = "".join(
    json.dumps({"question": f"{a}+{b}", "answer": f"#### {a + b}"}) + "\n" for a in range(9) for b in range(9)
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of a second whose warm start is taken to have succeeded at its first check."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_start, "success_rate", lambda *given: 0.5)
    (tmp_path / "sums.jsonl").write_text(FILE)
    return TrainConfig(
        root=tmp_path / "runs",
        calculator=CalculatorConfig(operations_min=1, operations_max=2, largest=9),
        counting=CountingConfig(length_max=6),
        graph_path=GraphPathConfig(nodes=4, edges=4),
        math_jsonl=MathJsonlConfig(train="sums.jsonl"),
        small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=24),
        warm_start=WarmStartConfig(check_every=1, check_prompts=4, batch=8),
        sample=SampleConfig(prompts=2, group_size=3, max_new_tokens=10, max_turns=3),
        optimize=OptimizeConfig(steps=2),
        critic=CriticConfig(width=8, updates=1),
        measure=MeasureConfig(exact=Schedule(every=2, prompts=1)),
        evaluate=EvaluateConfig(every=0),
    )


@pytest.mark.parametrize("task", ["calculator", "counting", "graph_path", "running_total", "math_jsonl"])
def test_task_is_trained_from_nothing_to_a_stored_run(config, task, one_thread):
    path = loop.train(replace(config, task=task))
    store = RunStore(path)
    assert store.info["status"] == "complete"
    assert store.complete_steps() == [0, 1]
    assert np.isfinite(store.tokens_df(where="mask")["advantage"]).all()
    assert (path / "model" / "config.json").is_file()


EASY = {
    "calculator": {"calculator": CalculatorConfig(operations_min=1, operations_max=1, operators="+", largest=5)},
    "counting": {"counting": CountingConfig(length_min=3, length_max=5, letters=3)},
    "graph_path": {"graph_path": GraphPathConfig(nodes=4, edges=3)},
    "math_jsonl": {"math_jsonl": MathJsonlConfig(train="sums.jsonl")},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", EASY)
def test_small_model_learns_an_easy_form_of_the_task_from_demonstrations(tmp_path, monkeypatch, task, one_thread):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text(FILE)
    config = TrainConfig(
        task=task,
        small_model=SmallModelConfig(layers=2, width=64, heads=4, key_value_heads=2, feed_forward=128),
        sample=SampleConfig(max_new_tokens=16, max_turns=3),
        warm_start=WarmStartConfig(success_low=0.3, success_high=1.0, batch=32, check_prompts=64, max_steps=1_000),
        **EASY[task],
    )
    facts = json.loads((warm_started(config, cache=tmp_path) / "warm_start.json").read_text())
    assert facts["success"] >= 0.3


def test_task_of_ones_own_is_trained_by_its_name_as_documented(config, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    Path("my_tasks.py").write_text(code, encoding="utf-8")
    words = "train --task my_tasks:Reverse --root runs --run own --small-model.layers 1 --small-model.width 16 "
    words += "--small-model.heads 2 --small-model.key-value-heads 1 --small-model.feed-forward 24 "
    words += "--warm-start.check-every 1 --warm-start.batch 4 --sample.prompts 2 --sample.group-size 2 "
    words += "--sample.max-new-tokens 6 --optimize.steps 1 --measure.exact.every 0 --evaluate.prompts 2"
    assert main(words.split()) == 0
    info = RunStore(Path("runs") / "own").info
    assert (info["status"], info["config"]["task"]) == ("complete", "my_tasks:Reverse")
    namespace = {}
    exec(code, namespace)
    task = namespace["Reverse"](TrainConfig())
    texts = {split: {task.prompt(split, k).text for k in range(400)} for split in ("train", "heldout")}
    assert not texts["train"] & texts["heldout"] and min(map(len, texts.values())) > 100
    assert {text[0] for text in texts["train"]} == {text[0] for text in texts["heldout"]} == set("abcd")


def test_task_that_raises_in_a_step_ends_the_run_with_its_name_and_keeps_what_was_complete(config, monkeypatch):
    from otb_analysis.tasks import Counting

    seen = []

    def reward(self, prompt, turns):
        seen.append(prompt.id)
        if len(seen) > 6:  # the first step's six rollouts are paid
            raise KeyError("gold")
        return [{"correct": 0.0}]

    monkeypatch.setattr(Counting, "reward", reward)
    with pytest.raises(
        InputError, match=r"task 'counting' failed in reward for rollout 0 \(prompt '.*KeyError: 'gold'"
    ):
        loop.train(replace(config, task="counting", run="doomed"))
    store = RunStore(config.root / "doomed")
    assert store.complete_steps() == [0]
    assert (store.info["status"], store.info["reason"].split(" (")[0]) == (
        "failed",
        "task 'counting' failed in reward for rollout 0",
    )


def test_warm_start_of_a_changed_file_or_own_task_is_made_again(config):
    own = replace(config, task="math_jsonl")
    first = warm_started(own)
    assert warm_started(own) == first
    Path("sums.jsonl").write_text(FILE.replace("#### 3", "#### 4"))
    assert warm_started(own) != first


def test_demonstrations_that_leave_a_choice_are_checked_whatever_their_loss(config, monkeypatch):
    # The loss of the first steps is far above what is learned enough to check; the eighth check comes anyway.
    steps = []
    monkeypatch.setattr(warm_start, "success_rate", lambda *given: steps.append(1) or 0.5)
    facts = json.loads((warm_started(replace(config, task="graph_path")) / "warm_start.json").read_text())
    assert (facts["steps"], len(steps)) == (warm_start.CHECKED_ANYWAY, 1)
