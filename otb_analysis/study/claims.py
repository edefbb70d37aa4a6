"""Sentences that a study checks case by case: on how many they hold is what its verdict says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from otb_analysis.errors import InputError
from otb_analysis.study.words import markdown_table, share

FEW = 10
"""Below this many cases a share is written as a count, without an interval."""


@dataclass(frozen=True)
class Claim:
    """One checkable sentence.

    Attributes:
        fact: Number of the fact that it is part of.
        words: The sentence.
        holds: On how many of the cases it does.
        cases: Policies, settings or intervals that were looked at.
        numbers: What was found.
        short: Words for it in the verdict where it does not hold everywhere; none where it is not worth them.
    """

    fact: int
    words: str
    holds: int
    cases: int
    numbers: str
    short: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.holds <= self.cases or not self.cases:
            raise InputError(
                f"claim {self.words!r} holds on {self.holds} of {self.cases} cases; leave out a claim without cases."
            )

    @property
    def everywhere(self) -> bool:
        """True where it holds on every case."""
        return self.holds == self.cases

    @property
    def verdict(self) -> str:
        """`holds`, `does not`, or the share of cases with its exact (Clopper–Pearson) 95 % interval."""
        if self.holds in (0, self.cases):
            return "does not" if not self.holds else "holds"
        if self.cases < FEW:
            return f"on {self.holds} of {self.cases}"
        ends = stats.binomtest(self.holds, self.cases).proportion_ci(method="exact")
        found = f"{share(self.holds / self.cases)} ({100 * ends.low:.0f}–{100 * ends.high:.0f})"
        return f"on {found} of {self.cases}"


def claims_verdict(claims: Sequence[Claim], facts: Mapping[int, str]) -> str:
    """Return how many facts hold in all their claims and which, then how many claims do, and where the others do not.

    Args:
        claims: All of them.
        facts: The facts in words, by number.
    """
    whole = [fact for fact in facts if all(c.everywhere for c in claims if c.fact == fact)]
    held = f"{sum(c.everywhere for c in claims)} of {len(claims)} claims hold on every case"
    listed = "".join(f"; {c.short}: {c.verdict}" for c in claims if c.short and not c.everywhere)
    return f"{_whole(whole, facts)}: {held}{listed}."


def _whole(whole: Sequence[int], facts: Mapping[int, str]) -> str:
    """Which facts hold throughout, in words where they are few."""
    if len(whole) in (0, len(facts)):
        return f"{'All' if whole else 'None'} of the {len(facts)} facts hold on every case"
    said = "; ".join(f"{fact}, “{facts[fact]}”" for fact in whole) if len(whole) < 3 else ", ".join(map(str, whole))
    hold = "holds" if len(whole) == 1 else "hold"
    return (
        f"Only {len(whole)} of the {len(facts)} facts {hold} on every case ({said}). Of the others some claims do not"
    )


def facts_table(claims: Sequence[Claim], facts: Mapping[int, str]) -> str:
    """Return one row per fact: it holds, does not, or holds in part.

    Args:
        claims: All of them.
        facts: The facts in words, by number.
    """
    rows = []
    for fact, words in facts.items():
        own = [c for c in claims if c.fact == fact]
        held = sum(c.everywhere for c in own)
        said = "holds" if held == len(own) else "holds in part" if any(c.holds for c in own) else "does not"
        rows.append([f"{fact}. {words}", said, f"{held} of {len(own)}"])
    return markdown_table(["fact", "verdict", "claims that hold on every case"], rows)


def claims_table(claims: Sequence[Claim]) -> str:
    """Return one row per claim: the sentence, where it holds, what was found.

    Args:
        claims: In their order.
    """
    return markdown_table(
        ["claim", "verdict", "found"], [[f"{c.fact}. {c.words}", c.verdict, c.numbers] for c in claims]
    )
