"""What only a clone has: `benchmarks/` and `studies/` beside the package. They are in no wheel."""

import sys
from pathlib import Path

import otb_analysis
from otb_analysis.errors import InputError


def enter_clone(command: str) -> Path:
    """Make `benchmarks` and `studies` importable and return the folder of the clone.

    It goes onto `sys.path`, which processes that are spawned inherit.

    Raises:
        InputError: The package was installed from a wheel.
    """
    clone = Path(otb_analysis.__file__).parent.parent
    if not all((clone / room / "__init__.py").is_file() for room in ("benchmarks", "studies")):
        raise InputError(f"{command} works in a clone: git clone the repository, then pip install -e '.[all]' in it.")
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    return clone
