"""A user's own code: imported by `module:attribute`, or by the name under which an installed package registers it.

Every failure is one sentence with its name. A package registers estimators, tasks, formats of recorded rollouts, levels
of measuring and conventions of advantages as entry points of the groups `otb_analysis.estimators`, `.tasks`,
`.formats`, `.levels` and `.conventions`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from otb_analysis.errors import STOPS, InputError, nearest


@cache  # looks at every installed package, 14 ms, and is asked for each name of an estimator
def plugins(kind: str) -> dict[str, EntryPoint]:
    """Return what installed packages register of a kind (estimator, task, format, level), by name; none is imported."""
    return {point.name: point for point in entry_points(group=f"otb_analysis.{kind}s")}


def is_custom(kind: str, name: str) -> bool:
    """Return whether a name that no catalogue has is a module:attribute, or one that a package registers."""
    return ":" in name or name in plugins(kind)


def import_attribute(kind: str, name: str) -> Any:
    """Import what a name stands for: what a package registers, or module:attribute, also from the working directory.

    Raises:
        InputError: The module cannot be imported, or has no such attribute.
    """
    if name in plugins(kind):
        point = plugins(kind)[name]
        try:
            return point.load()
        except Exception as error:  # someone else's package can fail in any way
            package = point.dist.name if point.dist else point.module
            raise InputError(
                f"{kind} {name!r} of package {package} cannot be imported ({one_line(error)}); mend or uninstall it."
            ) from error
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


@contextmanager
def foreign(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever someone else's code raises into one sentence; errors that already are one sentence pass.

    Raises:
        InputError: What failed, the exception, and the remedy.
    """
    try:
        yield
    except STOPS:
        raise
    except Exception as error:  # someone else's code can fail in any way
        raise InputError(f"{what} ({one_line(error)}); {remedy}") from error
