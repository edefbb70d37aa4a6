"""Optional packages: imported only where they are used, and asked for by the name of their extra."""

import sys
from contextlib import suppress
from importlib.util import find_spec

from otb_analysis.errors import InputError

EXTRAS = {
    "torch": ("torch", "torch"),
    "transformers": ("transformers", "torch"),
    "networkx": ("networkx", "torch"),
    "streamlit": ("streamlit", "dashboard"),
    "accelerate": ("accelerate", "train"),
    "peft": ("peft", "train"),
    "math_verify": ("math-verify", "train"),
    "tensorboard": ("tensorboard", "train"),
    "reasoning_gym": ("reasoning-gym", "tasks"),
    "gguf": ("gguf", "models"),
    "vllm": ("vllm", "vllm"),
    "ray": ("ray", "ray"),
    "trl": ("trl", "trl"),
    "playwright": ("playwright", "dev"),
    "kaleido": ("kaleido", "figures"),
    "matplotlib": ("matplotlib", "figures"),
    "wandb": ("wandb", ""),
    "trackio": ("trackio", ""),
    "mlflow": ("mlflow", ""),
    "apprise": ("apprise", "watch"),
}
"""Module → its package, and the extra of this one that brings it, where there is one."""


def require(module: str, purpose: str) -> None:
    """Refuse to go on where an optional package is missing; "peft is needed for …" ends with the purpose.

    Raises:
        InputError: It is not installed; the sentence says what installs it.
    """
    missing = True
    with suppress(ImportError):  # raised by whatever hides a package, as tests do
        missing = (sys.modules[module] if module in sys.modules else find_spec(module)) is None
    if missing:
        package, extra = EXTRAS[module]
        how = f"'.[{extra}]' in a clone, 'FILE.whl[{extra}]' from a wheel" if extra else f"'{package}'"
        raise InputError(f"{package} is needed for {purpose}; pip install {how}.")


def require_models(purpose: str) -> None:
    """Refuse to go on without PyTorch and transformers, which bring models and tokenizers; as `require` does."""
    for module in ("torch", "transformers"):
        require(module, purpose)
