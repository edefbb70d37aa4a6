"""Another version of TRL is refused in one sentence, before anything of it is touched."""

import sys

import pytest

from otb_analysis.errors import InputError
from otb_analysis.integrations.trl_batch import load_trl, refuse_version


@pytest.mark.parametrize("installed", ["1.15.0", "1.17.0", "1.17.0.dev0", "0.24.0", "2.0", "main"])
def test_other_versions_are_refused(installed):
    with pytest.raises(
        InputError, match=rf"trl {installed} is installed, .* tested with trl>=1.16,<1.17 only; pip install"
    ):
        refuse_version(installed)


@pytest.mark.parametrize("installed", ["1.16.0", "1.16.3", "1.16.0.post1"])
def test_tested_versions_are_taken(installed):
    refuse_version(installed)


def test_missing_package_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(InputError, match=r"trl is needed for OTBGRPOTrainer; pip install '\.\[trl\]' in a clone"):
        load_trl()
