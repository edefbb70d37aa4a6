"""Optional packages: imported only where they are used, and asked for by the name of their extra."""

import sys
from importlib.util import find_spec

from otb_analysis.errors import InputError

EXTRAS = {
    "accelerate": ("accelerate", "train"),
    "peft": ("peft", "train"),
    "math_verify": ("math-verify", "train"),
    "tensorboard": ("tensorboard", "train"),
    "reasoning_gym": ("reasoning-gym", "tasks"),
    "gguf": ("gguf", "models"),
    "vllm": ("vllm", "vllm"),
    "trl": ("trl", "trl"),
    "playwright": ("playwright", "dev"),
    "kaleido": ("kaleido", "figures"),
    "matplotlib": ("matplotlib", "figures"),
    "ray": ("ray", "ray"),
    "wandb": ("wandb", ""),
    "trackio": ("trackio", ""),
}
"""Module → its package, and the extra of this one that brings it, where there is one."""


def require(module: str, purpose: str) -> None:
    """Refuse to go on where an optional package is missing; "peft is needed for …" ends with the purpose.

    Raises:
        InputError: It is not installed; the sentence says what installs it.
    """
    loaded = module in sys.modules  # None there hides a package, as tests do
    if (sys.modules[module] if loaded else find_spec(module)) is None:
        package, extra = EXTRAS[module]
        how = f"'.[{extra}]' in a clone, 'FILE.whl[{extra}]' from a wheel" if extra else f"'{package}'"
        raise InputError(f"{package} is needed for {purpose}; pip install {how}.")
