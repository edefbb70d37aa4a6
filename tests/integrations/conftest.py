"""What every test of an integration needs."""

import pytest


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """Keep TRL from reporting each trainer to its makers: a thread that waits for the network beside the training."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # for processes that a test starts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
