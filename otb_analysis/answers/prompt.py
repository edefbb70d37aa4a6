"""The numbers of the page Tokens: one prompt's tokens under an estimator, and a token's formula."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers.run import RunAnswers
from otb_analysis.answers.token_formula import token_details, token_formula
from otb_analysis.errors import STOPS, InputError, nearest
from otb_analysis.figures.rollouts import ends_elsewhere
from otb_analysis.figures.styles import number
from otb_analysis.figures.token_columns import (
    ADVANTAGES,
    DIFFERENCES,
    RATIO,
    SAMPLER,
    TITLES,
    measured,
    with_differences,
)
from otb_analysis.schema import TOKENS, column
from otb_analysis.store import RunStore, StoredPrompt
from otb_analysis.store.measured import exact_steps, first_step, token_steps
from otb_analysis.store.token_arrays import in_words
from otb_analysis.types import Label

KEYS = ("rollout", "turn", "t", "token", "mask")
FACTS = ("rollout", "reward", "length", "finish_reason", "completion")
MEANINGS = {
    SAMPLER: "log π under the policy minus the sampler's own.",
    ADVANTAGES: "Advantage under {estimator} minus that under {against}.",
    RATIO: "Exact ‖∇log π‖² over the calibrated proxy ({how}).",
}
"""What the columns mean that are not stored."""


@dataclass(frozen=True)
class PromptView:
    """One prompt at one step of a run, under an estimator or the difference of two."""

    store: RunStore
    step: int
    group: int
    rollouts: pd.DataFrame  # The prompt's rows of `rollouts`
    prompt: StoredPrompt
    labels: list[Label]
    label: Label | None  # None where no estimator's advantages are known
    against: Label | None
    alarm: str  # Of the run's sampling check; empty where there is none

    @cached_property
    def table(self) -> pd.DataFrame:
        """The tokens with the estimator's baseline and advantage, and all differences."""
        other: Any = None if self.against is None else self.prompt.with_estimator(self.against)["advantage"]
        tokens = self.prompt.tokens if self.label is None else self.prompt.with_estimator(self.label)
        return with_differences(tokens, other)

    def rollout_tokens(self, rollout: int | None) -> pd.DataFrame:
        """Return the tokens of a rollout, or of all, with the columns that were measured."""
        rows: Any = self.table if rollout is None else self.table[self.table["rollout"] == rollout]
        return rows.sort_values(["rollout", "t"])[[*KEYS, *measured(self.table)]]


def prompt_view(
    store: RunStore, step: int | None, group: int | None, estimator: str, against: str, rollout: int | None = None
) -> PromptView:
    """Open one prompt, or that of a rollout; where something is not named, with what the page begins with.

    Args:
        estimator: In the page's words, as `rloo` or `otb (exact)`; empty for the one that trained.
        against: Another one, whose advantage is taken off; empty for none.

    Raises:
        InputError: There is no such step, prompt or estimator; the sentence names those there are.
        StoreError: The run cannot be read.
    """
    steps = token_steps(store)
    if not steps:
        raise InputError(f"{store.path.name} has no step whose tokens and rollouts are stored; name another run.")
    run = RunAnswers(store)
    if step is None:
        step = run.look if run.look in steps else first_step(steps, exact_steps(store))
    if step not in steps:
        raise InputError(f"step {step} of {store.path.name} has no tokens; steps {steps[0]} to {steps[-1]} have.")
    rollouts: Any = store.rollouts_df([step])
    groups = sorted({int(one) for one in rollouts["group"]})
    if group is None:
        groups_of_it = rollouts["group"][rollouts["rollout"] == rollout].tolist()
        group = int(groups_of_it[0]) if groups_of_it else run.first_prompt(step)
    group = groups[0] if group is None else group
    if group not in groups:
        raise InputError(f"step {step} has no prompt {group}; it has prompts {groups[0]} to {groups[-1]}.")
    tokens = store.tokens_df([step], where='"group" = ?', params=[group])
    prompt = StoredPrompt(run.estimator, run.config, group, tokens, lambda of: store.token_arrays(step, of))
    labels = prompt.labels()
    first = next((label for label in [prompt.trained, *labels] if label in labels), None)
    return PromptView(
        store, step, group, rollouts[rollouts["group"] == group], prompt, labels,
        _named(labels, estimator) if estimator else first, _named(labels, against) if against else None, run.alarm,
    )  # fmt: skip


def _named(labels: list[Label], words: str) -> Label:
    """Return the label that is called so on the page, or the first one with that name: `otb` is `otb (proxy)`."""
    known = {in_words(label): label for label in labels}
    named = known.get(words, next((label for label in labels if label[0] == words), None))
    if named is None:
        raise InputError(f"estimator {words!r} cannot be computed for this prompt; {nearest(words, known)}")
    return named


def tokens_record(view: PromptView, rollout: int | None = None, t: int | None = None) -> dict[str, Any]:
    """Return a prompt's head, rollouts and tokens for JSON, and one token's formula where `t` is given.

    Raises:
        InputError: There is no such rollout or token.
    """
    words = [in_words(label) if label else "" for label in (view.label, view.against)]
    rows = view.rollout_tokens(rollout)
    if rollout is not None and rollout not in set(view.rollouts["rollout"]):
        raise InputError(f"prompt {view.group} has no rollout {rollout}; see them without --rollout.")
    head = prompt_head(view.rollouts, view.prompt.tokens, view.prompt.estimator)
    facts: Any = view.rollouts[[name for name in FACTS if name in view.rollouts]]
    answers = [ends_elsewhere(head.answer, text) for text in facts["completion"]]
    record: dict[str, Any] = {
        "run": view.store.path.name, "alarm": view.alarm, "step": view.step, "prompt": view.group, "head": asdict(head),
        "estimator": words[0] or None, "against": words[1] or None, "estimators": [in_words(x) for x in view.labels],
        "rollouts": facts.assign(ends_with=answers), "tokens": rows,
        "columns": {name: asdict(described(view.table, name, *words)) for name in measured(view.table)},
    }  # fmt: skip
    return record | ({} if t is None else {"token": token_record(view, rollout, t)})


def token_record(view: PromptView, rollout: int | None, t: int) -> dict[str, Any]:
    """Return what a click on a token shows: its numbers, and the estimator's formula with them.

    Raises:
        InputError: There is no such token.
    """
    if rollout is None:
        raise InputError("--t needs the rollout of the token; pass --rollout, too.")
    formula, refused = None, None
    try:
        if view.label is not None:
            inputs, rollouts = view.prompt.inputs(view.label)
            formula = token_formula(view.label[0], inputs, rollouts, rollout, t, view.prompt.options(view.label))
    except STOPS as error:
        refused = str(error)
    names = ("estimator", "formula", "to_go", "baseline", "advantage", "fallback", "others", "terms", "by_position")
    shown = {name: getattr(formula, name, None) for name in names}
    of_trained = formula if view.label == view.prompt.trained else None
    details = token_details(view.prompt.tokens, rollout, t, view.prompt.estimator, of_trained)
    if details is None:
        raise InputError(f"rollout {rollout} has no token {t} at step {view.step}; its tokens start at 0.")
    return {
        "rollout": rollout, "t": t, "numbers": dict(details.formulas), "not_known": refused,
        "formula": None if formula is None else {"lines": dict(formula.lines), "is_sum": formula.is_sum} | shown,
    }  # fmt: skip


@dataclass(frozen=True)
class PromptHead:
    """What stands above the rollouts of a prompt."""

    text: str
    answer: str  # Reference answer, empty where none was recorded
    rewards: str  # What was paid
    equal: str  # What equal rewards mean for the gradient; empty where rewards differ


def prompt_head(rollouts: pd.DataFrame, tokens: pd.DataFrame, estimator: str = "") -> PromptHead:
    """Return the prompt, its reference answer and what its rollouts were paid.

    Args:
        rollouts: The prompt's rows of the table `rollouts`.
        tokens: Its rows of `tokens`, with the advantages of the estimator that trained.
        estimator: The estimator that trained.
    """
    known: Any = rollouts.reindex(columns=["prompt", "answer", "reward"])
    text, answer = (next((x for x in known[name] if isinstance(x, str)), "") for name in ("prompt", "answer"))
    reward = known["reward"].dropna().to_numpy(np.float64)
    values, counts = np.unique(reward, return_counts=True)
    if len(values) > 4:
        paid = f"{len(reward)} rewards from {number(values[0])} to {number(values[-1])}, mean {number(reward.mean())}"
    else:
        pairs = zip(values[::-1], counts[::-1], strict=True)
        paid = ", ".join(f"{n} × {number(value)}" if n > 1 else number(value) for value, n in pairs)
    means: Any = rollouts.filter(regex="^reward_").apply(pd.to_numeric, errors="coerce").mean().dropna()
    if len(means) > 1:
        parts = (f"{name.removeprefix('reward_')} {number(mean)}" for name, mean in means.items())
        paid += f" (means of parts: {', '.join(parts)})"
    if len(reward) < 2 or len(values) > 1:
        return PromptHead(text, answer, paid, "")
    advantage = tokens.reindex(columns=["advantage"]).abs().dropna().to_numpy(np.float64)
    moved = int((advantage > 1e-6 * max(1.0, abs(reward[0]))).sum())  # equal rewards may still move tokens
    effect = ": no gradient here." if advantage.size else ": no gradient here with a baseline from this group."
    if moved:
        under, largest = estimator or "the estimator that trained", number(float(advantage.max()))
        effect = f", yet {moved:,} of {advantage.size:,} tokens have an advantage under {under}, up to {largest}."
    return PromptHead(text, answer, paid, f"All {len(reward)} rewards are {number(float(reward[0]))}{effect}")


@dataclass(frozen=True)
class Described:
    """How a page calls a column."""

    title: str
    unit: str
    meaning: str


def described(tokens: pd.DataFrame, name: str, estimator: str = "", against: str = "") -> Described:
    """Return how a column of these tokens is called, its unit and what it means.

    Args:
        estimator: Whose baseline and advantage the table has.
        against: Whose advantage was taken off.
    """
    if name in DIFFERENCES:
        stored = "energy_calibrated" in tokens and bool(tokens["energy_calibrated"].notna().any())
        how = "as stored" if stored else "c·proxy^b, fitted to this prompt's exact norms"
        return Described(*DIFFERENCES[name], MEANINGS[name].format(estimator=estimator, against=against, how=how))
    if name not in {c.name for c in TOKENS}:
        return Described(name, "", "Stored beside the columns of otb-analysis, such as another trainer's numbers.")
    title, unit, meaning = TITLES.get(name, name), column("tokens", name).unit, column("tokens", name).meaning
    if name == "grad_norm_sq" and "measured_by" in tokens and bool((tokens["measured_by"] == "sketch").any()):
        title = "Estimated ‖∇log π‖²"
        meaning += " Estimated by sketching: a click shows the standard error; some are below 0."
    if name in ("baseline", "advantage") and estimator:
        title, meaning = f"{name} of {estimator}", f"{name[0].upper()}_t of {estimator}."
    return Described(title, unit, meaning)
