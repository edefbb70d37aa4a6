"""The state of the tiny run before its first step."""

from dataclasses import replace

import pytest

from otb_analysis.models import load_policy
from otb_analysis.tasks import make_task
from otb_analysis.training.setup import Trainer


@pytest.fixture
def made(tiny_config):
    """Make the state of a run with some fields of its configuration changed."""

    def make(**changes):
        config = replace(tiny_config, **changes)
        model, tokenizer = load_policy(config.model)
        return Trainer(config, model, tokenizer, make_task(config))

    return make


@pytest.fixture
def trainer(made):
    """The state of a run before its first step."""
    return made()
