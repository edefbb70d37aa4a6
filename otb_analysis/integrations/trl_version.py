"""Which TRL this package works with."""

import importlib
import re
from importlib.metadata import version
from typing import Any

from otb_analysis.errors import InputError
from otb_analysis.extras import require

FIRST, BEYOND = (1, 16), (1, 17)
"""The versions that the contract test ran with: from the first, and below the second; as the extra `trl` pins."""


def load_trl() -> Any:
    """Return the package trl.

    Raises:
        InputError: It is not installed, or in a version that the contract test did not run with.
    """
    require("trl", "OTBGRPOTrainer")
    refuse_version(version("trl"))
    return importlib.import_module("trl")


def refuse_version(installed: str) -> None:
    """Raise where a version of TRL lies outside the tested ones.

    Raises:
        InputError: It does.
    """
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not FIRST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
        raise InputError(
            f"trl {installed} is installed, but OTBGRPOTrainer overrides methods that change between versions and is "
            "tested with trl>=1.16,<1.17 only; pip install 'trl>=1.16,<1.17', or use RolloutRecorder, which takes "
            "others."
        )
