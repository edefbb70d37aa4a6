import pytest

from otb_analysis.errors import InputError
from otb_analysis.study.claims import Claim, claims_table, claims_verdict, facts_table

FACTS = {1: "One", 2: "Two", 3: "Three"}
CLAIMS = [
    Claim(1, "All", 60, 60, "0", short="never said"),
    Claim(2, "Some", 6, 60, "x", short="some do"),
    Claim(2, "Others", 5, 5, "y"),
    Claim(3, "None", 0, 4, "z"),
]


def test_a_claim_says_on_how_many_cases_it_holds():
    # Clopper–Pearson of 6 of 60: 3.8 % to 20.5 %
    assert [c.verdict for c in CLAIMS] == ["holds", "on 10 % (4–21) of 60", "holds", "does not"]
    assert Claim(1, "Few", 2, 3, "").verdict == "on 2 of 3"


def test_the_verdict_begins_with_the_facts_that_hold_and_ends_with_the_claims_that_do_not():
    assert claims_verdict(CLAIMS, FACTS) == (
        "Only 1 of the 3 facts holds on every case (1, “One”). Of the others some claims do not: "
        "2 of 4 claims hold on every case; some do: on 10 % (4–21) of 60."
    )
    whole = "All of the 1 facts hold on every case: 1 of 1 claims hold on every case."
    assert claims_verdict(CLAIMS[:1], {1: "One"}) == whole


def test_a_fact_holds_where_all_of_its_claims_do():
    lines = facts_table(CLAIMS, FACTS).splitlines()[2:]
    assert lines == [
        "| 1. One | holds | 1 of 1 |",
        "| 2. Two | holds in part | 1 of 2 |",
        "| 3. Three | does not | 0 of 1 |",
    ]
    assert claims_table(CLAIMS).splitlines()[2] == "| 1. All | holds | 0 |"


@pytest.mark.parametrize(("holds", "cases"), [(0, 0), (3, 2), (-1, 2)])
def test_a_claim_without_cases_is_refused(holds, cases):
    with pytest.raises(InputError, match="leave out a claim without cases"):
        Claim(1, "None", holds, cases, "")
