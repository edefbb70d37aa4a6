"""The state of the tiny run before its first step."""

import pytest

from otb_analysis.models import load_policy
from otb_analysis.tasks import make_task
from otb_analysis.training.setup import Trainer


@pytest.fixture
def trainer(tiny_config):
    """The state of a run before its first step."""
    model, tokenizer = load_policy(tiny_config.model)
    return Trainer(tiny_config, model, tokenizer, make_task(tiny_config))
