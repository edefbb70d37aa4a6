"""Optional packages: imported only where they are used, and asked for by the name of their extra."""

import sys
from importlib.util import find_spec

from otb_analysis.errors import InputError

EXTRAS = {
    "accelerate": ("accelerate", "otb-analysis[train]"),
    "peft": ("peft", "otb-analysis[train]"),
    "math_verify": ("math-verify", "otb-analysis[train]"),
    "tensorboard": ("tensorboard", "otb-analysis[train]"),
    "reasoning_gym": ("reasoning-gym", "otb-analysis[tasks]"),
    "gguf": ("gguf", "otb-analysis[models]"),
    "vllm": ("vllm", "otb-analysis[vllm]"),
    "trl": ("trl", "otb-analysis[trl]"),
    "playwright": ("playwright", "otb-analysis[dev]"),
    "ray": ("ray", "otb-analysis[ray]"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}
"""Module → its package, and what pip is told to install."""


def require(module: str, purpose: str) -> None:
    """Refuse to go on where an optional package is missing; "peft is needed for …" ends with the purpose.

    Raises:
        InputError: It is not installed; the sentence says what installs it.
    """
    loaded = module in sys.modules  # None there hides a package, as tests do
    if (sys.modules[module] if loaded else find_spec(module)) is None:
        package, extra = EXTRAS[module]
        raise InputError(f"{package} is needed for {purpose}; pip install '{extra}'.")
