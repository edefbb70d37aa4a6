"""From a name and inputs to an estimate, a few groups at a time so that every intermediate stays in cache.

A custom estimator, `module:function` or a package's, is a function of `EstimatorInputs` to advantages [N, T]. What it
reads is found by trial calls on a few made-up rollouts, so nothing has to be declared: an input without which it fails
is needed, one without which it goes on is used where it is there. Whether it is unbiased is not known, and never
assumed.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, make_dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.arrays import Groups, at_policy_tokens, has_gaps, masked, returns_to_go
from otb_analysis.custom import foreign, import_attribute, is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.registry import ESTIMATORS, is_portfolio, portfolio
from otb_analysis.estimators.spec import (
    EstimatorSpec,
    RegressionOptions,
    check_shapes,
    prepare,
    selector,
)
from otb_analysis.objectives.registry import checked_options, options_from_table, policy_values
from otb_analysis.types import Estimate, EstimatorInputs, Float, Int

GIVEN = ("reward", "mask", "group")
OPTIONAL = tuple(field.name for field in fields(EstimatorInputs) if field.name not in (*GIVEN, "state"))
WHOLE_NUMBERS = ("turn", "token_id", "prompt")
TRIAL, AT_WORK = "in a trial on 4 prompts of 4 rollouts", "on the rollouts it was given"

_specs: dict[str, tuple[Callable[..., Any], EstimatorSpec]] = {}


def custom_estimate(
    name: str, entry: EstimatorSpec, inputs: EstimatorInputs, names: tuple[str, ...], options: Any
) -> Estimate:
    """Return the checked answer of a custom function, with B = G − A, as if it had only subtracted a baseline.

    The function gets copies: float64, zero outside the mask, None for inputs that it did not read in the trial.

    Raises:
        InputError: The function raises; returns another shape, NaN, or something outside the mask; or an input has a
            NaN inside the mask.
    """
    mask = np.array(inputs.mask)
    copies: dict[str, Any] = {"mask": mask.copy(), "group": np.array(inputs.group)}
    for read in ("reward", *names):
        x = getattr(inputs, read)
        copies[read] = np.array(x, np.float64) if np.ndim(x) == 1 else policy_values(read, x, mask)
        if read in WHOLE_NUMBERS:
            copies[read] = copies[read].astype(np.int64)
    given = EstimatorInputs(**copies)
    advantage = _answer(name, lambda: entry.function(given, options), mask, AT_WORK)
    baseline = masked(returns_to_go(np.asarray(inputs.reward), mask) - advantage, mask)
    return Estimate(baseline, advantage, np.zeros(mask.shape, bool))


def _answer(name: str, call: Callable[[], object], mask: np.ndarray, where: str) -> Float:
    """Return advantages in float64, or one sentence that names the function and what is wrong with them."""
    with foreign(f"estimator {name!r} failed {where}", "mend the function."):
        answer = call()
    wanted = f"return advantages of shape [N, T] = {mask.shape}"
    try:
        advantage = np.array(answer, np.float64)
    except Exception as error:  # whatever it is, it is no array of numbers
        raise InputError(f"estimator {name!r} returned a {type(answer).__name__} {where}; {wanted}.") from error
    if advantage.shape != mask.shape:
        raise InputError(f"estimator {name!r} returned an array of shape {advantage.shape} {where}; {wanted}.")
    for wrong, what, remedy in (
        (mask & ~np.isfinite(advantage), "", "return finite numbers, also where all rewards of a group are equal"),
        (~mask & (advantage != 0), ", outside the mask,", "multiply by inputs.mask"),
    ):
        if wrong.any():
            n, t = map(int, np.argwhere(wrong)[0])
            raise InputError(
                f"estimator {name!r} returned {advantage[n, t]:.3g} at rollout {n}, token {t}{what} {where}; {remedy}."
            )
    return advantage


def _spec_by_trials(name: str, function: Any) -> EstimatorSpec:
    """Call the function on the trial rollouts, with every input and then without each one that it read.

    Its options are the parameters after the first that have a number or text as default.
    """
    if not callable(function):
        raise InputError(f"estimator {name!r} is a {type(function).__name__}; name a function of EstimatorInputs.")
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some compiled functions do not tell
        parameters = []
    settable = [p for p in parameters if type(p.default) in (int, float, str)]
    options = make_dataclass("OwnOptions", [(p.name, type(p.default), p.default) for p in settable], frozen=True)
    seen: set[str] = set()
    trial = _trial()

    class Watched(EstimatorInputs):
        """Inputs that note which of them are read."""

        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    def attempt(*absent: str) -> None:
        copies: dict[str, Any] = {key: None if key in absent else x.copy() for key, x in trial.items()}
        inputs = Watched(**copies)
        _answer(name, lambda: function(inputs, **asdict(options())), trial["mask"], TRIAL)

    attempt()
    needs: list[str] = []
    uses: list[str] = []
    while left := [x for x in OPTIONAL if x in seen and x not in (*needs, *uses)]:
        try:
            attempt(left[0])
            uses.append(left[0])
        except InputError:
            needs.append(left[0])
    if "energy" in uses:  # energies are always there, and the label of the estimate names their source
        uses.remove("energy")
        needs.append("energy")
    return EstimatorSpec(
        lambda inputs, chosen: function(inputs, **asdict(chosen)),
        (inspect.getdoc(function) or name).splitlines()[0], unbiased=False, conditions="not known", source=name,
        provenance="code", needs=tuple(needs), uses=tuple(uses), options=options, takes_single=True,
        batch_coupled=True,  # it sees the whole batch, so other prompts may matter
    )  # fmt: skip


def _trial() -> dict[str, np.ndarray]:
    """Return inputs of rollouts of unequal lengths; one group earns nothing and one everything, as in every run."""
    rng = np.random.default_rng(0)
    n, t = 16, 6
    length = rng.integers(1, t + 1, size=n)
    mask = np.arange(t) < length[:, None]
    right = np.concatenate([np.zeros(4), np.ones(4), [1, 0, 0, 1, 0, 1, 0, 0]])
    inputs = {
        "reward": right[:, None] * (np.arange(t) == length[:, None] - 1),
        "mask": mask,
        "group": np.repeat(np.arange(4), 4),
        "rollout_norm_sq": rng.lognormal(size=n),
        "turn": np.zeros((n, t), np.int64),
        "token_id": rng.integers(0, 9, size=(n, t)) * mask,
        "prompt": np.repeat(np.arange(4), 4),
    }
    positive = ("energy", "position_baseline", "value", "ratio", "entropy")
    return inputs | {name: rng.lognormal(size=(n, t)) * mask for name in positive}


BLOCK_ELEMENTS = 1 << 16  # Entries of [rows, T] worked on at once; whole groups, so at least one group


def entry_of(name: str) -> EstimatorSpec:
    """Return the EstimatorSpec of a name in `ESTIMATORS`, of a portfolio of them, or of one of your own.

    Your own function is called on trial rollouts; the same one is tried once.

    Raises:
        InputError: No estimator has that name, or the portfolio or the custom function cannot be used.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if is_portfolio(name):
        return portfolio(name, ESTIMATORS)
    if not is_custom("estimator", name):
        hint = nearest(name, [*ESTIMATORS, *plugins("estimator")])
        raise InputError(f"estimator {name!r} does not exist; {hint} Your own is named module:function.")
    function = import_attribute("estimator", name)
    if name not in _specs or _specs[name][0] is not function:
        _specs[name] = function, _spec_by_trials(name, function)
    return _specs[name][1]


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
    the mask are never read, but for rewards: one paid there counts at the policy token before it, or else the first. A
    rollout without policy tokens has no return and takes no part in any mean.

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
    mask, reward = np.asarray(inputs.mask), np.asarray(inputs.reward)
    outside = reward[~mask]  # NaN there is padding; a finite reward counts at a policy token
    if outside.any() and (np.isfinite(outside) & (outside != 0)).any():
        kept = np.where(mask | np.isfinite(reward), reward, 0.0).astype(np.float64)
        inputs = replace(inputs, reward=at_policy_tokens(kept, mask))
    if name not in ESTIMATORS and not is_portfolio(name):
        return custom_estimate(name, entry, inputs, names, options)
    if not entry.takes_gaps and has_gaps(mask):
        raise InputError(
            f"mask has gaps (tool tokens before policy tokens), where column and position differ, but {name} takes "
            f"position from the column; use {counting_tokens(name)}, which counts policy tokens."
        )
    out = Estimate(np.zeros(mask.shape), np.zeros(mask.shape), np.zeros(mask.shape, bool))
    state = None
    whole = entry.batch_coupled or "state" in entry.uses
    for rows, groups in _blocks(Groups.from_labels(inputs.group), mask.shape[1], whole):
        batch, moved = prepare(inputs, rows, groups, names)
        result = entry.function(batch, options)
        state = result.state  # only entries that see the whole batch as one block have any
        baseline = result.baseline * batch.alive
        advantage = batch.returns - baseline
        if result.scale is not None:
            advantage *= result.scale
        pieces = (baseline, advantage, batch.mask & result.fallback)
        for answer, piece in zip((out.baseline, out.advantage, out.fallback), pieces, strict=True):
            if moved is None:
                answer[selector(rows), : batch.mask.shape[1]] = piece
            else:  # tokens were squeezed: back to where they were
                placed = np.zeros(moved.shape, piece.dtype)
                placed[moved] = piece[batch.mask]
                answer[selector(rows)] = placed
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
