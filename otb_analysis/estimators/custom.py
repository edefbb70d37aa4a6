"""A custom estimator: `module:function`, or a package's, names a function of `EstimatorInputs` to advantages [N, T].

What the function reads is found by trial calls on a few made-up rollouts, so nothing has to be declared: an input
without which it fails is needed, one without which it goes on is used where it is there. Whether it is unbiased is not
known, and never assumed.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, fields, make_dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.arrays import masked, returns_to_go
from otb_analysis.custom import import_attribute, one_line
from otb_analysis.errors import STOPS, InputError
from otb_analysis.estimators.spec import EstimatorSpec
from otb_analysis.objectives.registry import policy_values
from otb_analysis.types import Estimate, EstimatorInputs, Float

GIVEN = ("reward", "mask", "group")
OPTIONAL = tuple(field.name for field in fields(EstimatorInputs) if field.name not in (*GIVEN, "state"))
WHOLE_NUMBERS = ("turn", "token_id")
TRIAL, AT_WORK = "in a trial on 4 prompts of 4 rollouts", "on the rollouts it was given"

_specs: dict[str, tuple[Callable[..., Any], EstimatorSpec]] = {}


def custom_spec(name: str) -> EstimatorSpec:
    """Return the EstimatorSpec of a custom function, after trial calls; the same function is tried once.

    Its options are the function's other parameters that have a number or a text as default.

    Raises:
        InputError: The module or function does not exist, fails on the trial, or returns what no estimator may.
    """
    function = import_attribute("estimator", name)
    known = _specs.get(name)
    if known is None or known[0] is not function:
        known = _specs[name] = function, _spec_by_trials(name, function)
    return known[1]


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
    read: dict[str, Any] = {x: _copied(x, getattr(inputs, x), mask) for x in ("reward", *names)}
    copies = EstimatorInputs(mask=mask.copy(), group=np.array(inputs.group), **read)
    advantage = _answer(name, lambda: entry.function(copies, options), mask, AT_WORK)
    baseline = masked(returns_to_go(np.asarray(inputs.reward), mask) - advantage, mask)
    return Estimate(baseline, advantage, np.zeros(mask.shape, bool))


def _copied(name: str, x: Any, mask: np.ndarray) -> np.ndarray:
    if np.ndim(x) == 1:
        return np.array(x, np.float64)
    values = policy_values(name, x, mask)
    return values.astype(np.int64) if name in WHOLE_NUMBERS else values


def _answer(name: str, call: Callable[[], object], mask: np.ndarray, where: str) -> Float:
    """Return advantages in float64, or one sentence that names the function and what is wrong with them."""
    try:
        answer = call()
    except STOPS:
        raise
    except Exception as error:  # someone else's code can fail in any way
        raise InputError(f"estimator {name!r} failed {where} ({one_line(error)}); mend the function.") from error
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
    """Call the function on the trial rollouts, with every input and then without each one that it read."""
    options = _options(name, function)
    seen: set[str] = set()
    trial = _trial()

    def attempt(absent: tuple[str, ...] = ()) -> None:
        inputs = _watched(replace(trial, **dict.fromkeys(absent)), seen)
        _answer(name, lambda: function(inputs, **asdict(options())), trial.mask, TRIAL)

    attempt()
    needs: list[str] = []
    uses: list[str] = []
    while left := [x for x in OPTIONAL if x in seen and x not in (*needs, *uses)]:
        try:
            attempt((left[0],))
            uses.append(left[0])
        except InputError:
            needs.append(left[0])
    if "energy" in uses:  # energies are always there, and the label of the estimate names their source
        uses.remove("energy")
        needs.append("energy")
    return EstimatorSpec(
        lambda inputs, chosen: function(inputs, **asdict(chosen)),
        formula=(inspect.getdoc(function) or name).splitlines()[0],
        unbiased=False,
        conditions="not known",
        source=name,
        provenance="code",
        needs=tuple(needs),
        uses=tuple(uses),
        options=options,
        batch_coupled=True,  # it sees the whole batch, so other prompts may matter
        takes_single=True,
    )


def _options(name: str, function: Any) -> type:
    """Return an options dataclass of the parameters after the first that have a number or text as default."""
    if not callable(function):
        raise InputError(f"estimator {name!r} is a {type(function).__name__}; name a function of EstimatorInputs.")
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some compiled functions do not tell
        parameters = []
    settable = [p for p in parameters if type(p.default) in (int, float, str)]
    return make_dataclass("OwnOptions", [(p.name, type(p.default), p.default) for p in settable], frozen=True)


def _watched(inputs: EstimatorInputs, seen: set[str]) -> EstimatorInputs:
    """Return copies of the inputs that note which of them are read."""

    class Watched(EstimatorInputs):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    copies: dict[str, Any] = {name: None if x is None else x.copy() for name, x in vars(inputs).items()}
    return Watched(**copies)


def _trial() -> EstimatorInputs:
    """Return rollouts of unequal lengths; one group earns nothing and one everything, as happens in every run."""
    rng = np.random.default_rng(0)
    n, t = 16, 6
    length = rng.integers(1, t + 1, size=n)
    mask = np.arange(t) < length[:, None]
    right = np.concatenate([np.zeros(4), np.ones(4), [1, 0, 0, 1, 0, 1, 0, 0]])
    reward = right[:, None] * (np.arange(t) == length[:, None] - 1)

    def positive(*shape: int) -> Float:
        return rng.lognormal(size=shape)

    return EstimatorInputs(
        reward=reward,
        mask=mask,
        group=np.repeat(np.arange(4), 4),
        energy=positive(n, t) * mask,
        rollout_norm_sq=positive(n),
        position_baseline=positive(n, t) * mask,
        value=positive(n, t) * mask,
        turn=np.zeros((n, t), np.int64),
        token_id=rng.integers(0, 9, size=(n, t)) * mask,
        ratio=positive(n, t) * mask,
        entropy=positive(n, t) * mask,
    )
