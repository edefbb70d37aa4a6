"""From a name and inputs to an estimate, a few groups at a time so that every intermediate stays in cache."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from otb_analysis.arrays import Groups, has_gaps
from otb_analysis.custom import is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.batch import BaselineResult, Batch, check_shapes, prepare, selector
from otb_analysis.estimators.custom import custom_estimate, custom_spec
from otb_analysis.estimators.portfolio import is_portfolio, portfolio
from otb_analysis.estimators.registry import ESTIMATORS
from otb_analysis.estimators.spec import EstimatorSpec, RegressionOptions
from otb_analysis.objectives.registry import checked_options, options_from_table
from otb_analysis.types import Bool, Estimate, EstimatorInputs, Int

BLOCK_ELEMENTS = 1 << 16  # Entries of [rows, T] worked on at once; whole groups, so at least one group


def entry_of(name: str) -> EstimatorSpec:
    """Return the EstimatorSpec of a name in `ESTIMATORS`, of a portfolio of them, or of one of your own.

    Raises:
        InputError: No estimator has that name, or the portfolio or the custom function cannot be used.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if is_portfolio(name):
        return portfolio(name, ESTIMATORS)
    if is_custom("estimator", name):
        return custom_spec(name)
    hint = nearest(name, [*ESTIMATORS, *plugins("estimator")])
    raise InputError(f"estimator {name!r} does not exist; {hint} Your own is named module:function.")


def available(inputs: EstimatorInputs, also: Iterable[str] = ()) -> list[str]:
    """Return every estimator whose inputs exist, in the order of the catalogue; the custom ones of `also` come last.

    A mask with gaps leaves out the estimators that take no gaps.
    """
    gaps = has_gaps(np.asarray(inputs.mask))
    entries = ESTIMATORS | {name: entry_of(name) for name in also if name not in ESTIMATORS}
    return [name for name, entry in entries.items() if not missing(entry, inputs) and (entry.takes_gaps or not gaps)]


def missing(entry: EstimatorSpec, inputs: EstimatorInputs, options: Any = None) -> list[str]:
    """Return the inputs an estimator needs under its options, by default the usual ones, that are not there."""
    return [need for need in entry.needed(options) if getattr(inputs, need) is None]


def options_from_dict(name: str, values: Mapping[str, Any]) -> Any:
    """Return an instance of an estimator's options from a configuration's table; what is left out keeps its default.

    Raises:
        InputError: The estimator or one of the options does not exist, or a value does not fit.
    """
    return options_from_table(name, entry_of(name).options, values)


def with_limit(name: str, options: Any, limit: int) -> Any:
    """Return an estimator's options, with the sampling limit where it takes one and was given none.

    Args:
        name: As for `estimate`.
        options: As for `estimate`.
        limit: Most policy tokens that a rollout can have, fixed before sampling; 0 where it is not known.
    """
    options = checked_options(name, entry_of(name).options, options)
    return replace(options, T_max=limit) if isinstance(options, RegressionOptions) and not options.T_max else options


def estimate(name: str, inputs: EstimatorInputs, options: Any = None) -> Estimate:
    """Return baseline and advantage of every token in float64, zero outside the mask.

    A_{i,t} = G_{i,t} − B_{i,t} (GRPO then divides); the formula of B is `ESTIMATORS[name].formula`. Entries outside
    the mask are never read. A rollout without policy tokens has no return and takes no part in any mean.

    Raises:
        InputError: Unknown name, missing input, wrong shape, a value that cannot be, wrong options, or a mask with
            gaps where column and position must agree.
    """
    entry = entry_of(name)
    options = checked_options(name, entry.options, options)
    if lacking := missing(entry, inputs, options):
        raise InputError(f"{name} needs {' and '.join(lacking)}, which is None; pass it in EstimatorInputs.")
    used = (use for use in entry.uses if use != "state" and getattr(inputs, use) is not None)
    names = (*entry.needed(options), *used)
    check_shapes(inputs, names)
    if name not in ESTIMATORS and not is_portfolio(name):
        return custom_estimate(name, entry, inputs, names, options)
    mask = np.asarray(inputs.mask)
    if not entry.takes_gaps and has_gaps(mask):
        raise InputError(
            f"mask has gaps (tool tokens before policy tokens), where column and position differ, but {name} takes "
            f"position from the column; use {counting_tokens(name)}, which counts policy tokens."
        )
    out = Estimate(np.zeros(mask.shape), np.zeros(mask.shape), np.zeros(mask.shape, bool))
    state = None
    for rows, groups in _blocks(Groups.of(inputs.group), mask.shape[1], entry.batch_coupled):
        batch, moved = prepare(inputs, rows, groups, names)
        result = entry.function(batch, options)
        _write(out, selector(rows), batch, moved, result)
        state = result.state  # only entries that see the whole batch as one block have any
    return replace(out, state=state)


def counting_tokens(name: str) -> str:
    """Return the name of the form of an estimator that takes tool tokens: `otb_turn` for `otb`, in portfolios too."""
    return re.sub(r"\botb(_loo)?\b", r"otb_turn\1", name)


def _blocks(groups: Groups, width: int, whole: bool) -> Iterator[tuple[Int, Groups]]:
    """Yield rows and their groups, whole groups at a time; one block for everything when prompts are coupled."""
    if not len(groups.index):
        return
    count = groups.count
    ends = np.cumsum(count)
    block = np.zeros(len(ends), np.int64) if whole else (ends - count) * max(width, 1) // BLOCK_ELEMENTS
    stops = np.flatnonzero(np.diff(block, append=-1)) + 1
    for first, stop in zip(np.concatenate([[0], stops[:-1]]), stops, strict=True):
        rows = groups.order[ends[first] - count[first] : ends[stop - 1]]
        yield rows, Groups(groups.index[rows] - first, groups.labels[first:stop])


def _write(out: Estimate, take: Int | slice, batch: Batch, moved: Bool | None, result: BaselineResult) -> None:
    """Put A = (G − B)·scale inside the mask, in place; `moved` is the block's own mask when tokens were squeezed."""
    baseline = result.baseline * batch.alive
    advantage = batch.returns - baseline
    if result.scale is not None:
        advantage *= result.scale
    pieces = (baseline, advantage, batch.mask & result.fallback)
    for whole, piece in zip((out.baseline, out.advantage, out.fallback), pieces, strict=True):
        if moved is None:
            whole[take, : batch.mask.shape[1]] = piece
        else:
            placed = np.zeros(moved.shape, piece.dtype)
            placed[moved] = piece[batch.mask]
            whole[take] = placed
