"""Pages of methods: one screen, in the index, and every interval is one of the study that the page names."""

import re
from pathlib import Path

import pytest

METHODS = Path(__file__).parent.parent / "docs" / "methods"
STUDIES = {
    "allocation": "12_allocation", "counting-readout": "10_counting_readout", "filters": "15_filters",
    "token-weights": "13_token_weights", "triadic-tokens": "14_triadic_tokens", "soft-tokens": "16_soft_tokens",
}  # fmt: skip


@pytest.mark.parametrize(("name", "study"), STUDIES.items())
def test_page_is_a_screen_and_its_intervals_stand_in_its_study(name, study):
    text = (METHODS / f"{name}.md").read_text(encoding="utf-8")
    page = (METHODS.parent.parent / "studies" / study / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"[+-]?[\d.]+(?: %)? \([+-]?[\d.]+(?:–| to )[+-]?[\d.]+\)", text)
    assert said and [interval for interval in said if interval not in page] == []
    assert len(text.splitlines()) <= 60 and f"]({name}.md)" in (METHODS / "README.md").read_text(encoding="utf-8")
