"""Three tiny runs, trained once: OTB measured at every step, the same unmeasured, and the group mean."""

from dataclasses import replace

import pytest
import torch

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.models import load_policy
from otb_analysis.tasks import make_task
from otb_analysis.training.loop import train
from otb_analysis.training.setup import Trainer


class Half:
    """Pays 1 when the completion's first character is odd: an untrained model gets some of it."""

    name = "half"
    alphabet = "0123456789+=;#"

    def __init__(self, config):
        self.inner = make_task(replace(config, task="chain_sum"))

    def prompt(self, split, index):
        return self.inner.prompt(split, index)

    def demonstration(self, prompt):
        return self.inner.demonstration(prompt)

    def reply(self, prompt, turns):
        return None

    def reward(self, prompt, turns):
        return [{"odd": float(turns[-1].text[:1] in tuple("13579"))}]


@pytest.fixture(scope="session")
def half_task():
    """The catalogue with one more task, for as long as the tests run."""
    from otb_analysis.tasks import TASKS

    TASKS["half"] = Half
    yield
    del TASKS["half"]


@pytest.fixture(scope="session")
def tiny_config(checkpoint, half_task):
    """A run of a second: 3 steps, 4 prompts of 3 rollouts, every group measured at every step."""
    return TrainConfig(
        model=str(checkpoint),
        task="half",
        chain_sum=ChainSumConfig(terms_min=2, terms_max=3, largest=20),
        sample=SampleConfig(prompts=4, group_size=3, max_new_tokens=6),
        estimator=EstimatorConfig(name="otb"),
        optimize=OptimizeConfig(steps=3, learning_rate=1e-2, max_grad_norm=0.5),
        critic=CriticConfig(width=8, updates=2),
        measure=MeasureConfig(exact=Schedule(every=1, prompts=0)),
        evaluate=EvaluateConfig(every=2, prompts=8),
    )


@pytest.fixture(scope="session")
def trained(tiny_config, tmp_path_factory):
    """Train variants of the tiny run on one thread; the same variant is trained once."""
    root = tmp_path_factory.mktemp("runs")
    made = {}

    def run(name, **changes):
        if name not in made:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            made[name] = train(replace(tiny_config, run=name, root=root, **changes))
            torch.set_num_threads(before)
        return made[name]

    return run


@pytest.fixture(scope="session")
def otb_run(trained):
    return trained("otb")


@pytest.fixture
def trainer(tiny_config):
    """The state of a run before its first step."""
    model, tokenizer = load_policy(tiny_config.model)
    return Trainer(tiny_config, model, tokenizer, make_task(tiny_config))
