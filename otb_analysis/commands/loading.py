"""PyTorch and transformers, loaded by the commands that run a model; all others do without."""

from collections.abc import Iterator
from contextlib import contextmanager

from otb_analysis.extras import require_models
from otb_analysis.phases import phase


@contextmanager
def models_loading(command: str) -> Iterator[None]:
    """Show that a command loads them inside the block, and keep their own bars and notes off the terminal.

    Raises:
        InputError: They are not installed; the sentence says what installs them.
    """
    require_models(command)
    with phase("loading PyTorch and transformers"):
        from otb_analysis.rollouts.models import quiet_loading

        quiet_loading()
        yield
