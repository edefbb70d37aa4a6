"""01_enumeration: how a claim is told from the cases that it holds on."""

import importlib
from pathlib import Path

import pytest

from studies.lib.record import load_study

FOLDER = Path(__file__).parent.parent.parent / "studies" / "01_enumeration"


@pytest.fixture(scope="module")
def derived():
    """The file that checks the claims."""
    load_study(FOLDER)
    return importlib.import_module(f"study_{FOLDER.name}.derived")


def test_a_claim_says_on_how_many_cases_it_holds(derived):
    # Clopper–Pearson of 6 of 60: 3.8 % to 20.5 %
    cases = ([True] * 60, [True] * 6 + [False] * 54, [True, False, True], [False] * 4)
    claims = [derived.Claim(2, held) for held in cases]
    assert [claim.often for claim in claims] == ["all 60", "10 % (4–21) of 60", "2 of 3", "none of 4"]
    assert [claim.everywhere for claim in claims] == [True, False, False, False]


def test_ratios_of_groups_are_of_mean_variances_with_an_interval_of_both(derived):
    # 4 × 2 over 32 × 1 chunks: (2/4)/(1/32) = 16 and the errors 1/√2/2 and 0; t of one degree of freedom is 12.706
    chunks = {4: [derived.np.array([1.0, 3.0])], 32: [derived.np.array([1.0, 1.0])]}
    (found,) = derived.size_ratios(lambda n, name, measure: chunks[n], "nv")
    assert found.estimate == pytest.approx(16)
    assert derived.np.log(found.high / found.estimate) == pytest.approx(12.706 * 0.5, abs=1e-2)
