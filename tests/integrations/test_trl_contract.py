"""A TRL that does not keep the contract is refused in one sentence that names what failed, whatever its version."""

import sys
from types import ModuleType

import pytest

from otb_analysis.errors import InputError
from otb_analysis.integrations import trl_batch
from otb_analysis.integrations.trl_batch import METHODS, load_trl


class Keeps:
    """A trainer with every method of the contract, whose loss takes advantages of both shapes."""

    def _compute_loss(self, model, inputs):
        advantages = inputs["advantages"]
        return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


for name in set(METHODS) - {"_compute_loss"}:
    setattr(Keeps, name, lambda self: None)


class OneNumber(Keeps):
    """One whose loss takes one number a rollout."""

    def _compute_loss(self, model, inputs):
        return inputs["advantages"].unsqueeze(1)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a TRL with this trainer is installed."""

    def install(trainer):
        module = ModuleType("trl")
        monkeypatch.setattr(module, "GRPOTrainer", trainer, raising=False)
        monkeypatch.setitem(sys.modules, "trl", module)
        monkeypatch.setattr(trl_batch, "require", lambda *words: None)
        monkeypatch.setattr(trl_batch, "version", lambda name: "9.9")
        return module

    return install


def test_what_keeps_the_contract_is_taken_whatever_its_version(installed):
    assert installed(Keeps) is load_trl()


@pytest.mark.parametrize("name", METHODS)
def test_the_method_that_is_missing_is_named(installed, name):
    attributes = {method: getattr(Keeps, method) for method in METHODS if method != name}
    installed(type("GRPOTrainer", (), attributes))
    with pytest.raises(InputError, match=f"GRPOTrainer of trl 9.9 has no {name}, .* RolloutRecorder"):
        load_trl()


def test_a_loss_that_takes_one_number_a_rollout_is_refused(installed):
    installed(OneNumber)
    with pytest.raises(InputError, match=r"_compute_loss of trl 9\.9 .*by token \[B, T\]"):
        load_trl()


def test_missing_package_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(InputError, match=r"trl is needed .*'\.\[trl\]'"):
        load_trl()
