"""Several runs: all of a root as one table, and counts, means and variances of their per-token columns."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.phases import counted
from otb_analysis.schema import TABLES
from otb_analysis.store.layout import list_runs
from otb_analysis.store.reader import RunStore

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

NUMBERS = tuple(c.name for c in TABLES["tokens"] if c.dtype == "FLOAT")
"""The columns that are aggregated; those of a run that hold no value are left out."""

_MEASURES = ", ".join(
    f'count("{c}") AS "n {c}", avg("{c}") AS "mean {c}", var_samp("{c}") AS "variance {c}"' for c in NUMBERS
)
# Tokens of one prompt depend on each other: whoever resamples these rows resamples prompts.
QUERY = f"""SELECT coalesce(prompt_id, step || '/' || "group") AS prompt, count(*) AS tokens,
    count(DISTINCT (step, rollout)) AS rollouts, {_MEASURES}
FROM tokens LEFT JOIN (
    SELECT step, "group", any_value(prompt_id) AS prompt_id FROM rollouts GROUP BY step, "group"
) USING (step, "group") WHERE mask GROUP BY 1 ORDER BY 1"""


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
    # Told explicitly: where every run is broken there is no time that could tell pandas the zone.
    times = pd.to_datetime(frame["created"].map(str), utc=True, format="ISO8601", errors="coerce")
    return frame.assign(created=times.astype(DTYPES["created"])).astype(DTYPES)


def can_be_opened(table: pd.DataFrame) -> pd.Series:
    """Return which rows of `runs_df` are runs that can be read and have a complete step."""
    readable: Any = (table["status"] != "broken") & (table["n_steps"].fillna(0) > 0)
    return readable


def matching(table: pd.DataFrame, asked: str) -> pd.Series:
    """Return which rows of `runs_df` fit every word of a text, such as `otb seed=1 heldout_reward>0.4`.

    A word is a part of the run's name, or a setting or result with what it is, is above or is below. Settings are
    named by any whole part of their dotted name.

    Raises:
        InputError: No column has that name.
    """
    fits = pd.Series(True, table.index)
    for word in asked.split():
        key, sign, value = re.split(r"(<=|>=|==|!=|[=<>]|$)", word, maxsplit=1)
        if not sign:
            fits &= table["run"].str.contains(key, case=False, regex=False)
            continue
        columns = [str(column) for column in table if f".{key}." in f".{column}."]
        if not columns:
            raise InputError(f"no run has the setting or result {key!r}; {nearest(key, map(str, table))}")
        kept = table[columns]
        limit: Any = pd.to_numeric(value, errors="coerce")
        numbers = kept.apply(pd.to_numeric, errors="coerce")
        if len(kept.select_dtypes(["datetime", "datetimetz"]).columns):  # the beginning of a date does
            limit, numbers = value, kept.astype(str).apply(lambda times, n: times.str[:n], n=len(value))
        if sign[0] in "<>" and limit != limit:  # NaN
            raise InputError(
                f"{word!r} asks for more or less than {value!r}, which is no number; write one behind {sign}."
            )
        equal = kept.astype(str).eq(value) | numbers.eq(limit)  # a seed beside a broken run's is 1.0
        more, less = numbers.gt(limit), numbers.lt(limit)
        asked_for = {
            ">": more,
            "<": less,
            ">=": more | equal,
            "<=": less | equal,
            "=": equal,
            "==": equal,
            "!=": ~equal,
        }
        fits &= asked_for[sign].any(axis=1)
    return fits


def estimator_names(table: pd.DataFrame) -> dict[str, str]:
    """Return the training estimator of each run, wherever its configuration keeps it."""
    columns = sorted((str(c) for c in table if str(c).removesuffix(".name").endswith(".estimator")), key=len)
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
    """Return a run's row of `runs_df`."""
    try:
        if not path.resolve().is_relative_to(path.parent.resolve()):
            raise StoreError(f"{path} is a link out of its directory; open the directory that it points to.")
        store = RunStore(path)
        info, updated, (status, reason) = store.info, pd.Timestamp(store.last_heard), store.live_status
        steps: Any = store.rows("steps", _COLUMNS).to_pandas()
    except (StoreError, InputError, OSError) as error:  # the last two: the run was replaced while it was being listed
        return {"run": path.name, "status": "broken", "reason": str(error)}
    tenth = max(1, len(steps) // 10)
    last = {name: steps[name].iloc[-1] if len(steps) else None for name in ("step", "grad_norm")}
    heldout = steps["heldout_reward"].dropna()
    config = info.get("config")
    row: dict[str, object] = {
        "run": path.name, "status": status, "created": info.get("created"), "updated": updated, "reason": reason,
        "schema_version": info.get("schema_version"), "n_steps": len(steps), "last_step": last["step"],
        "reward_first": steps["reward_mean"].head(tenth).mean(), "reward_last": steps["reward_mean"].tail(tenth).mean(),
        "heldout_reward": heldout.iloc[-1] if len(heldout) else None,
        "grad_norm_median": steps["grad_norm"].median(), "grad_norm_last": last["grad_norm"],
        "n_tokens": steps["n_tokens"].sum(min_count=1),
        "seconds": steps[list(_SECONDS)].sum(min_count=1).sum(min_count=1),
    }  # fmt: skip
    return row | dict(flat_config(config if isinstance(config, dict) else {}))


@dataclass(frozen=True)
class Partition:
    """The steps of one bin of a run."""

    path: Path
    first: int  # Where the bin begins
    last: int  # Its last step, had it all
    steps: tuple[int, ...]  # The complete ones


def partitions(paths: Iterable[Path], width: int) -> list[Partition]:
    """Return the bins of runs, each `width` steps wide and counted from step 0.

    Raises:
        StoreError: A run cannot be read.
    """
    bins: list[Partition] = []
    for path in paths:
        steps = RunStore(path).complete_steps()
        for first in dict.fromkeys(step // width * width for step in steps):
            inside = tuple(step for step in steps if first <= step < first + width)
            bins.append(Partition(path.resolve(), first, first + width - 1, inside))
    return bins


def aggregate(found: Sequence[Partition]) -> pd.DataFrame:
    """Return one row per bin, prompt and column: run, ends of the bin, prompt, tokens, rollouts, column, n and moments.

    Raises:
        InputError: None has a token of the policy.
        StoreError: A part is broken or missing.
    """
    parts = list[pd.DataFrame]()
    for one in counted(found, "bin"):
        wide: Any = RunStore(one.path, memory_limit="256MB").sql(QUERY, steps=one.steps)
        ends = {"run": one.path.name, "first_step": one.first, "last_step": one.last}
        about = ends | {name: wide[name] for name in ("prompt", "tokens", "rollouts")}
        for column in NUMBERS:
            if wide[f"n {column}"].sum():
                measures = {measure: wide[f"{measure} {column}"] for measure in ("n", "mean", "variance")}
                parts.append(pd.DataFrame(about | {"column": column} | measures))
    if not parts:
        raise InputError("none of these runs has tokens of the policy; name runs of otb train or otb score.")
    return pd.concat(parts, ignore_index=True)
