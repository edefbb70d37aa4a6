"""All runs of a root as one table: how each ended, its configuration, its headline numbers."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.layout import list_runs
from otb_analysis.store.liveness import standing
from otb_analysis.store.reader import RunStore, last_heard

DTYPES = {
    "run": "str",
    "status": "str",
    "created": "datetime64[us, UTC]",
    "updated": "datetime64[us, UTC]",
    "reason": "str",
    "schema_version": "Int64",
    "n_steps": "Int64",
    "last_step": "Int64",
    "reward_first": "float64",
    "reward_last": "float64",
    "heldout_reward": "float64",
    "grad_norm_median": "float64",
    "grad_norm_last": "float64",
    "n_tokens": "Int64",
    "seconds": "float64",
}
"""The fixed columns of `runs_df`; those of the configurations follow."""

_SECONDS = tuple(c.name for c in TABLES["steps"] if c.name.startswith("seconds_"))
_COLUMNS = ("step", "reward_mean", "heldout_reward", "grad_norm", "n_tokens", *_SECONDS)


def runs_df(root: str | Path = "runs") -> pd.DataFrame:
    """Return one row per run, by name: status, headline numbers, and its configuration as `config.<dotted name>`.

    `reward_first` and `reward_last` are means of `reward_mean` over the first and last tenth of the complete steps
    (rounded down, at least one step); `heldout_reward` is the last one there is; `n_tokens` and `seconds` are sums over
    steps.
    A run that cannot be read has status `broken` and its `reason` says why; one that says it is running while its
    process is gone has status `stopped`, and the reason of one on another machine says when it was last written to.

    Raises:
        StoreError: The root cannot be listed.
    """
    rows = [_row(path) for path in list_runs(Path(root))]
    extra = sorted({name for row in rows for name in row} - set(DTYPES))
    frame = pd.DataFrame(rows, columns=[*DTYPES, *extra])
    # Said explicitly: where every run is broken there is no time that could tell pandas the zone.
    frame["created"] = pd.Series([_time(created) for created in frame["created"]], dtype=DTYPES["created"])
    return frame.astype(DTYPES)


def can_be_opened(table: pd.DataFrame) -> pd.Series:
    """Return which rows of `runs_df` are runs that can be read and have a complete step."""
    readable: Any = (table["status"] != "broken") & (table["n_steps"].fillna(0) > 0)
    return readable


def estimator_names(table: pd.DataFrame) -> dict[str, str]:
    """Return the training estimator of each run, wherever its configuration keeps it."""
    names = [str(c) for c in table if str(c).removesuffix(".name").endswith(".estimator")]
    columns = sorted(names, key=len)
    if not columns:
        return {}
    first = table[columns].bfill(axis=1).iloc[:, 0]
    return {str(run): "" if pd.isna(name) else str(name) for run, name in zip(table["run"], first, strict=True)}


def flat_config(config: Mapping[str, object], prefix: str = "config") -> Iterator[tuple[str, object]]:
    """Yield a nested configuration as (dotted name, value) pairs; a list becomes its JSON."""
    for key, value in config.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from flat_config(value, name)
        else:
            yield name, json.dumps(value) if isinstance(value, list) else value


def _row(path: Path) -> dict[str, object]:
    try:
        if not path.resolve().is_relative_to(path.parent.resolve()):
            raise StoreError(f"{path} is a link out of its directory; open the directory that it points to.")
        store = RunStore(path)
        info, updated = store.info, pd.Timestamp(last_heard(path, store.info))
        numbers = _numbers(store.rows("steps", _COLUMNS).to_pandas())
    except (StoreError, InputError, OSError) as error:  # the last two: the run was replaced while it was being listed
        return {"run": path.name, "status": "broken", "reason": str(error)}
    config = info.get("config")
    fixed = {name: info.get(name) for name in ("created", "schema_version")}
    status, reason = standing(info, f"{updated:%Y-%m-%d %H:%M} UTC")
    fixed |= {"status": status, "reason": reason}
    settings = flat_config(config if isinstance(config, dict) else {})
    return {"run": path.name, "updated": updated} | fixed | numbers | dict(settings)


def _numbers(steps: pd.DataFrame) -> dict[str, object]:
    tenth = max(1, len(steps) // 10)
    return {
        "n_steps": len(steps),
        "last_step": _last(steps, "step"),
        "reward_first": steps["reward_mean"].head(tenth).mean(),
        "reward_last": steps["reward_mean"].tail(tenth).mean(),
        "heldout_reward": _last(steps.dropna(subset=["heldout_reward"]), "heldout_reward"),
        "grad_norm_median": steps["grad_norm"].median(),
        "grad_norm_last": _last(steps, "grad_norm"),
        "n_tokens": steps["n_tokens"].sum(min_count=1),
        "seconds": steps[list(_SECONDS)].sum(min_count=1).sum(min_count=1),
    }


def _time(text: object) -> pd.Timestamp:
    try:
        time: Any = pd.Timestamp(datetime.fromisoformat(str(text)))  # pandas would guess the format first
    except ValueError:
        time = pd.NaT
        return time
    return time.tz_localize("UTC") if time.tzinfo is None else time.tz_convert("UTC")


def _last(steps: pd.DataFrame, name: str) -> object:
    return steps[name].iloc[-1] if len(steps) else None
