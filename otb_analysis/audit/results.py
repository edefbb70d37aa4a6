"""What an audit found, as one tree of records: text, JSON and HTML are written from it and compute nothing."""

import json
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from otb_analysis.audit.bookkeeping import Bookkeeping
from otb_analysis.audit.sampling_report import SamplingReport
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.statistics import Interval

WIDE = 100.0
"""From this ratio of its ends on, an interval of a ratio says that noise hides the quantity, and is not shown."""


def is_told(ratio: Interval | None) -> bool:
    """Tell whether a ratio has an interval that says something."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return ratio.low > 0 and ratio.high / ratio.low < WIDE


@dataclass(frozen=True)
class EstimatorRow:
    """One estimator on the audited rollouts, for an update as large as a step of the run."""

    estimator: str
    energy_source: str
    # Share of an update that points along ∇J; None where fewer prompts were measured than a third of the noise scale
    efficiency: Interval | None
    noise_scale: Interval | None  # V/‖m‖² in prompts
    ratio: Interval | None  # Efficiency over that of the trainer's estimator; all intervals hold together with 95 %
    rollout_equivalents: Interval | None  # Rollouts that rloo needs for the same efficiency
    relative_bias: Interval | None
    c_known: bool  # True where c is proved, so that SF is variance/c² and the bias is not estimated
    projection: float | None  # c = ⟨m, ∇J⟩/‖∇J‖²
    sf: float | None  # Variance at equal progress, variance/c²
    variance: float | None  # Of an update
    within: float | None  # P·variance from rollouts of a prompt; for unbiased estimators only
    between: float | None  # P·variance from prompts, likewise
    sketched: bool  # True where gradients of some step were estimated from count sketches


@dataclass(frozen=True)
class Sketches:
    """What estimating gradients from count sketches adds to the error of the estimators' rows."""

    steps: int  # Steps that were sketched
    buckets: int
    error: float | None  # Largest standard error that it adds to any log V/V_rloo of a step; None below 2 prompts


@dataclass(frozen=True)
class Share:
    """Tokens of one kind: their signed part of Σ‖ḡ‖² over the attributed steps."""

    name: str
    n_tokens: int
    share: float
    size: float  # Part of Σ|share|: how much they pull, in whichever direction
    signal: float | None  # Part along other prompts' gradients
    noise: float | None  # Part along their own prompt's


@dataclass(frozen=True)
class Tokens:
    """Who holds the gradient."""

    steps: int
    n_tokens: int
    half: int  # The largest so many tokens hold half of Σ|share|
    by_class: tuple[Share, ...]
    by_position: tuple[Share, ...]
    by_prompt: tuple[Share, ...]


@dataclass(frozen=True)
class Proxy:
    """Whether the free proxy can stand for exact norms."""

    n_tokens: int
    pooled: Interval | None  # Correlation of log w, over all tokens
    within: Interval | None  # The same within (prompt, position), where baselines compare
    kept: Interval | None  # Efficiency of otb with the proxy over that with exact norms
    gain_lost: Interval | None  # Share of otb's gain over rloo that the proxy loses


@dataclass(frozen=True)
class AuditReport:
    """One audit; a part is None or empty where the run lacks what it needs, and `missing` says what adds it."""

    run: str
    rollouts: str  # Where they came from
    model: str
    trained: str  # The trainer's estimator
    n_steps: int
    n_prompts: int
    n_rollouts: int
    verdict: tuple[str, ...]
    estimators: tuple[EstimatorRow, ...]
    planner: Planner
    tokens: Tokens | None
    proxy: Proxy | None
    missing: tuple[str, ...]
    sketches: Sketches | None = None  # None where every Gram matrix is exact
    sampling: SamplingReport | None = None  # None where the tokens were not scored
    bookkeeping: Bookkeeping | None = None

    def as_json(self) -> str:
        """Return the whole tree as JSON; numbers that are not finite become null."""
        return json.dumps(_finite(asdict(self)), indent=1, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value
