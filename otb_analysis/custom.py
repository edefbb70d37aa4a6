"""Imports a user's own code by `module:attribute`, from the working directory too, and names every failure."""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from otb_analysis.errors import InputError, nearest


def is_custom(name: str) -> bool:
    """Return whether a name has the form module:attribute, which no name of a catalogue has."""
    return ":" in name


def import_attribute(kind: str, name: str) -> Any:
    """Import what `module:attribute` names; the directory the command runs in is searched too.

    Raises:
        InputError: The module cannot be imported, or has no such attribute.
    """
    module, _, attribute = name.partition(":")
    here = Path.cwd()
    sys.path.insert(0, str(here))
    try:
        loaded = import_module(module)
    except Exception as error:  # someone else's module can fail in any way
        close = get_close_matches(module, [path.stem for path in here.glob("*.py")], n=1)
        hint = f"did you mean {close[0]!r}? Pass" if close and close[0] != module else "pass"
        raise InputError(
            f"{kind} {name!r} cannot be imported ({one_line(error)}); {hint} module:attribute, "
            f"with the module in {here} or on PYTHONPATH."
        ) from error
    finally:
        sys.path.remove(str(here))
    if not hasattr(loaded, attribute):
        public = ((n, x) for n, x in vars(loaded).items() if not n.startswith("_"))
        defined = [n for n, x in public if getattr(x, "__module__", None) == module]
        hint = nearest(attribute, defined) if defined else "it defines nothing; pass module:attribute."
        raise InputError(f"{kind} {name!r}: module {module} has no {attribute!r}; {hint}")
    return getattr(loaded, attribute)


def one_line(error: Exception) -> str:
    """Return type and message of an exception, for the brackets of a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")[:200]
