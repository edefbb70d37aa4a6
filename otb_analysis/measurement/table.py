"""The token table: where torch stops. One step's rollouts and what was measured of them, as [N, T] NumPy columns.

`TokenMeasurements` alone decides `measured_by`: exact norms stand, whoever measured them; estimates fill only what
nobody measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from otb_analysis.energies import Calibration
from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.measurement.forward import ForwardPass
from otb_analysis.objectives.ratios import LOG_LIMIT
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import Totals, difference_total, horvitz_thompson
from otb_analysis.tasks import Task
from otb_analysis.tasks.task_calls import ask_reward
from otb_analysis.types import Bool, Estimate, EstimatorInputs, Float, Int, LogitStats


@dataclass(frozen=True)
class DrawnTokens:
    """How the tokens of the level `sampled` were drawn, and what their norms say about all others."""

    # π within the measured groups [N, T], 1 in those measured whole; NaN outside them and of the mask.
    probability: Float
    share: float  # Share of the step's groups that were measured; groups come in random order
    calibration: Calibration  # Proxy to exact energy, fitted on the measured tokens
    calibrated: Float  # Its prediction for every policy token [N, T], zero outside the mask

    @property
    def population(self) -> Bool:
        """True at the tokens that could be drawn [N, T]."""
        return np.isfinite(self.probability)


@dataclass(frozen=True)
class TokenMeasurements:
    """What was measured of a step's scores s_{n,t} = ∇ log π(y_{n,t}); made by the levels, read by the store."""

    norm_sq: Float  # ‖s_{n,t}‖² [N, T], exact or estimated; NaN where it was not measured
    stderr: Float  # Standard error of estimates [N, T]; those of one step share their directions and do not average out
    measured_by: NDArray[np.str_]  # How, at each token [N, T]: `none`, `exact` or `sketch`
    inclusion_prob: Float  # Chance of a token to be measured at this step [N, T]; known of tokens not drawn, too
    rollout_norm_sq: Float  # ‖Σ_t s_{n,t}‖² of rollouts whose group was measured whole [N], else NaN
    drawn: DrawnTokens | None = None  # How tokens were drawn, if the level `sampled` ran
    n_sketched: int = 0  # Groups with estimated norms
    # Columns of `tokens` that further levels fill [N, T], by name; NaN where nothing was measured.
    further: Mapping[str, Float] = field(default_factory=dict)

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> "TokenMeasurements":
        """Return the record of a step [N, T] at which nothing was measured."""
        unknown = np.full(shape, np.nan)
        return cls(unknown, unknown, np.full(shape, "none", "<U6"), unknown, np.full(shape[0], np.nan))

    @classmethod
    def exact(cls, norm_sq: Float, rollout_norm_sq: Float, group: Int) -> "TokenMeasurements":
        """Return the record of groups that were measured whole; both norms are NaN elsewhere."""
        known = np.isfinite(norm_sq)
        # Prompts come in random order, so measuring the first groups is drawing that share of the step's groups.
        share = len(np.unique(group[known.any(axis=1)])) / max(len(np.unique(group)), 1)
        return replace(
            cls.nothing(norm_sq.shape),
            norm_sq=norm_sq,
            measured_by=np.where(known, "exact", "none"),
            inclusion_prob=np.where(known, share, np.nan),
            rollout_norm_sq=rollout_norm_sq,
        )

    @property
    def fully_measured(self) -> Bool:
        """True at rollouts whose group was measured whole [N]."""
        return np.isfinite(self.rollout_norm_sq)

    @property
    def whole_norm_sq(self) -> Float:
        """Exact norms of the groups that were measured whole [N, T], NaN elsewhere: what estimators may read."""
        return np.where(self.fully_measured[:, None], self.norm_sq, np.nan)

    def with_drawn(self, norm_sq: Float, drawn: DrawnTokens) -> "TokenMeasurements":
        """Add exact norms of drawn tokens; `norm_sq` [N, T] repeats those that were known."""
        return replace(
            self,
            norm_sq=norm_sq,
            measured_by=np.where(np.isfinite(norm_sq), "exact", "none"),
            inclusion_prob=drawn.share * drawn.probability,
            drawn=drawn,
        )

    def with_groups(self, norm_sq: Float, share: float, how: str = "exact") -> "TokenMeasurements":
        """Add norms, exact or by `sketch`, of whole groups of which nothing was measured; NaN elsewhere."""
        here = np.isfinite(norm_sq)
        return replace(
            self,
            norm_sq=np.where(here, norm_sq, self.norm_sq),
            measured_by=np.where(here, how, self.measured_by),
            inclusion_prob=np.where(here, share, self.inclusion_prob),
        )

    def with_columns(self, columns: Mapping[str, Float]) -> "TokenMeasurements":
        """Add columns of `tokens` [N, T], NaN where nothing was measured."""
        return replace(self, further={**self.further, **columns})

    @property
    def energy_total(self) -> Totals | None:
        """Horvitz–Thompson total of the step's energy; None where no tokens were drawn or groups were left out."""
        if self.drawn is None or self.drawn.share < 1:
            return None
        chosen = self.drawn.population
        return horvitz_thompson(self.norm_sq[chosen], self.drawn.probability[chosen])


@dataclass(frozen=True)
class TokenTable:
    """One step's tokens; every formula from here on is NumPy float64."""

    mask: Bool  # True at policy tokens [N, T]
    present: Bool  # True at completion tokens, tool tokens included [N, T]
    group: Int  # Prompt of each rollout [N]
    turn: Int  # Turn of each token [N, T]
    token_id: Int  # Vocabulary index [N, T]; soft tokens have ids beyond the vocabulary
    behavior_logprob: Float  # The sampler's log-probability in nats [N, T], NaN outside the mask
    stats: LogitStats  # Forward statistics [N, T]; NaN at soft tokens, except their log-density
    reward: (
        Float  # What the estimator sees [N, T]: what the task paid, after shaping and penalties where a run has them
    )
    total_reward: Float  # What the task itself paid, summed over the rollout [N]
    value: Float | None  # V(h_t) before y_t [N, T], or None without a critic
    ratio: Float | None  # Importance ratio π(y_t)/μ(y_t) [N, T], or None where the run weighs nothing by it
    keep: Bool  # False for rollouts that take no part in the update [N]
    contrast: Float | None = None  # Contrast of right and wrong rollouts [N, T] where the update reads it
    limit: int = 0  # Most policy tokens that a rollout could have had, fixed before sampling; 0 where not known
    soft: SoftTokens | None = None  # The soft tokens among them
    prompt: Int | None = None  # A number of each rollout's prompt [N], the same at every step

    @property
    def drawn(self) -> Bool:
        """True at policy tokens that were drawn from a categorical distribution: all but soft ones [N, T]."""
        return self.mask if self.soft is None else self.mask & (self.token_id < self.soft.first)

    @property
    def proxy(self) -> Float | None:
        """Energies from the logits alone [N, T]; None where there are soft tokens, which have none."""
        return self.stats.energy if self.soft is None else None

    def inputs(self, energy: Float | None, rollout_norm_sq: Float | None = None) -> EstimatorInputs:
        """Return an estimator's inputs, with these energies [N, T]."""
        return EstimatorInputs(
            reward=self.reward,
            mask=self.mask,
            group=self.group,
            energy=energy,
            rollout_norm_sq=rollout_norm_sq,
            value=self.value,
            turn=self.turn,
            token_id=self.token_id,
            ratio=self.ratio,
            entropy=self.stats.entropy if self.soft is None else None,
            prompt=self.prompt,
        )


def compute_rewards(task: Task, rollouts: Rollouts) -> Rollouts:
    """Return rollouts with what the task pays for each, every turn's reward on that turn's last policy token.

    Raises:
        InputError: The task raises, does not pay every turn, or pays what is no number.
        NonFiniteError: A reward part is NaN or infinite; the message names rollout, group and part.
    """
    reward = np.zeros(rollouts.mask.shape)
    by_turn = [
        ask_reward(task, rollouts.prompts[g], turns, n)
        for n, (g, turns) in enumerate(zip(rollouts.group, rollouts.turns, strict=True))
    ]
    names = dict.fromkeys(name for turns in by_turn for parts in turns for name in parts)
    parts = {name: np.array([sum(p.get(name, 0.0) for p in turns) for turns in by_turn]) for name in names}
    for name, values in parts.items():
        if not np.isfinite(values).all():
            n = int(np.flatnonzero(~np.isfinite(values))[0])
            raise NonFiniteError(
                f"reward part {name!r} of rollout {n} (group {rollouts.group[n]}, prompt "
                f"{rollouts.prompts[rollouts.group[n]].id!r}) is {values[n]}; mend the task's reward."
            )
    unpaid = getattr(task, "unpaid", ())
    for n, turns in enumerate(by_turn):
        for k, turn_parts in enumerate(turns):
            tokens = np.flatnonzero(rollouts.mask[n] & (rollouts.turn[n] == k))
            if len(tokens):
                reward[n, tokens[-1]] += sum(value for name, value in turn_parts.items() if name not in unpaid)
    return replace(rollouts, reward=reward, reward_parts=parts)


def token_table(rollouts: Rollouts, forward: ForwardPass, value: Float | None) -> TokenTable:
    """Gather a step's columns by completion token; the task has paid for the rollouts."""
    mask, reward = rollouts.policy_tokens(), rollouts.rewards()
    number = [int.from_bytes(blake2b(prompt.id.encode(), digest_size=6).digest()) for prompt in rollouts.prompts]
    return TokenTable(
        mask=mask,
        present=rollouts.present(),
        group=rollouts.group,
        turn=rollouts.by_token(rollouts.turn),
        token_id=rollouts.by_token(rollouts.input_ids),
        behavior_logprob=np.where(mask, rollouts.by_token(rollouts.behavior_logprob), np.nan),
        stats=forward.stats,
        reward=reward,
        total_reward=reward.sum(axis=1),
        value=None if value is None else np.where(mask, value, 0.0),
        ratio=None,
        keep=np.ones(len(mask), bool),
        soft=rollouts.soft,
        prompt=np.array(number, np.int64)[rollouts.group],
    )


def token_ratio(table: TokenTable) -> Float:
    """Return π(y_t)/μ(y_t) [N, T] from the scored and the sampler's log-probabilities, zero outside the mask."""
    difference = np.where(table.mask, table.stats.logprob - np.nan_to_num(table.behavior_logprob), 0.0)
    return np.where(table.mask, np.exp(np.clip(difference, -LOG_LIMIT, LOG_LIMIT)), 0.0)


def token_rows(
    table: TokenTable, estimate: Estimate, measured: TokenMeasurements, tokenizer: PreTrainedTokenizerBase
) -> dict[str, object]:
    """Return the columns of the step's rows of `tokens`; masked entries were not measured.

    `estimate` is of the estimator that trains. Tokens are decoded one by one, so that readers need no tokenizer.
    """
    n, t = np.nonzero(table.present)
    ids, soft = table.token_id[n, t], table.soft
    if soft is None:
        texts = token_texts(tokenizer, ids.tolist())
    else:  # the text of a soft token is the likeliest token's behind a tilde
        of_soft, likeliest = ids >= soft.first, ids.copy()
        likeliest[of_soft] = soft.likeliest.cpu().numpy()[ids[of_soft] - soft.first]
        known = token_texts(tokenizer, likeliest.tolist())
        texts = ["~" * one + text for one, text in zip(of_soft.tolist(), known, strict=True)]
    policy, drawn = table.mask[n, t], table.drawn[n, t]

    def floats(x: Float, known: Bool = policy) -> np.ma.MaskedArray:
        return np.ma.masked_array(x[n, t], mask=~known)

    stats, behavior = table.stats, table.behavior_logprob[n, t]
    columns: dict[str, object] = {
        "group": table.group[n],
        "rollout": n,
        "turn": table.turn[n, t],
        "t": t,
        "token_id": ids,
        "token": texts,
        "mask": policy,
        "logprob": floats(stats.logprob),
        "behavior_logprob": np.ma.masked_array(behavior, mask=~policy | np.isnan(behavior)),
        "entropy": floats(stats.entropy, drawn),
        "sum_pi_sq": floats(stats.sum_pi_sq, drawn),
        "energy_proxy": floats(stats.energy, drawn),
        "reward": floats(table.reward),
        "baseline": floats(estimate.baseline, policy & ~np.isnan(estimate.baseline[n, t])),
        "advantage": floats(estimate.advantage),
    }
    if stats.hidden_norm_sq is not None:
        columns["hidden_norm_sq"] = floats(stats.hidden_norm_sq)
    if table.value is not None:
        columns["value"] = floats(table.value)
    numbers = {"grad_norm_sq": measured.norm_sq, "inclusion_prob": measured.inclusion_prob}
    if measured.n_sketched:
        numbers["grad_norm_sq_stderr"] = measured.stderr
    if measured.drawn is not None:
        numbers["energy_calibrated"] = measured.drawn.calibrated
    for name, x in {**numbers, **measured.further}.items():
        columns[name] = np.ma.masked_invalid(np.where(table.mask, x, np.nan)[n, t])
    return columns | {"measured_by": np.where(table.mask, measured.measured_by, "none")[n, t]}


_TEXTS = WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, str]]()
"""What was decoded, kept as long as the tokenizer: a step's thousand different tokens are those of the step before."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, decoded by itself."""
    known = _TEXTS.setdefault(tokenizer, {})
    if new := list(set(ids) - known.keys()):  # of none, one text would come back
        known.update(zip(new, tokenizer.batch_decode([[i] for i in new]), strict=True))
    return [known[i] for i in ids]


def rollout_rows(rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements) -> dict[str, object]:
    """Return the columns of the step's rows of `rollouts`; reward parts become columns `reward_<part>`.

    `energy_total` is the realized energy W_T of each rollout, with the calibrated proxy's help. It is unknown in groups
    that were left out, and its standard error is unknown where no token of the rollout was drawn. Masked entries were
    not measured.
    """
    prompts = [rollouts.prompts[g] for g in rollouts.group]
    columns: dict[str, object] = {
        "group": rollouts.group,
        "rollout": np.arange(len(rollouts.group)),
        "prompt_id": [p.id for p in prompts],
        "prompt": [p.shown for p in prompts],
        "answer": [p.answer or None for p in prompts],
        "completion": ["".join(turn.text + turn.reply for turn in turns) for turns in rollouts.turns],
        "reward": table.total_reward,
        "length": table.mask.sum(axis=1),
        "turns": [len(turns) for turns in rollouts.turns],
        "finish_reason": list(rollouts.finish_reason),
    }
    columns |= {f"reward_{name}": values for name, values in rollouts.reward_parts.items()}
    numbers = {"score_norm_sq": measured.rollout_norm_sq}
    if (drawn := measured.drawn) is not None:
        chosen = drawn.population
        totals = difference_total(
            measured.norm_sq[chosen], drawn.calibrated[chosen], drawn.probability[chosen], np.nonzero(chosen)[0]
        )
        for name, values in (("energy_total", totals.estimate), ("energy_total_stderr", totals.stderr)):
            numbers[name] = np.full(len(prompts), np.nan)
            numbers[name][totals.labels] = values
    return columns | {name: np.ma.masked_invalid(x) for name, x in numbers.items() if np.isfinite(x).any()}
