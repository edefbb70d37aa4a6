"""Numbers in triads: the tokens of worked numbers, round trips of any length, and what cannot be written."""

import numpy as np
import pytest

from otb_analysis.config import SmallModelConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.rollouts.models import load_policy, small_model, small_tokenizer
from otb_analysis.rollouts.triads import MARKERS, TriadTokenizer
from otb_analysis.training.check import check

TOKENIZER = TriadTokenizer("0123456789+-=;#.")


def tokens(text):
    return TOKENIZER.convert_ids_to_tokens(ids(text))


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", "7"),
        ("1234", "1 ⟨3⟩ 234"),
        ("1234567.12345", "1 ⟨6⟩ 234 ⟨3⟩ 567 . 123 ⟨.⟩ 45 ⟨.⟩ ⟨.⟩"),
        ("000100", "000 ⟨3⟩ 100"),
        ("12+999=1011", "12 + 999 = 1 ⟨3⟩ 011"),
        # 10^21 is the largest power and the rest before it
        ("1" + "0" * 21, "1 ⟨3⟩ ⟨18⟩ 000 ⟨18⟩ 000 ⟨15⟩ 000 ⟨12⟩ 000 ⟨9⟩ 000 ⟨6⟩ 000 ⟨3⟩ 000"),
    ],
)
def test_worked_numbers(text, expected):
    assert tokens(text) == expected.split()


def test_integers_and_decimals_of_any_length_come_back():
    rng = np.random.default_rng(0)
    for _ in range(500):
        whole, fraction = ("".join(rng.choice(list("0123456789"), size=n)) for n in rng.integers(1, 70, size=2))
        for text in (whole, f"{whole}.{fraction}", f"-{whole}+{fraction}={whole}#"):
            assert TOKENIZER.decode(ids(text)) == text


def test_no_two_numbers_have_the_same_tokens():
    numbers = [str(n) for n in range(2000)] + [f"{n}.{m}" for n in (0, 12, 1234) for m in ("0", "00", "5", "0005")]
    assert len({tuple(ids(text)) for text in numbers}) == len(numbers)


def test_suffixes_mean_no_character_and_show_themselves_alone():
    suffix = TOKENIZER.ids[MARKERS[0]]
    assert TOKENIZER.decode([*ids("12"), suffix, suffix]) == "12"
    assert TOKENIZER.decode([suffix]) == "⟨3⟩"


def test_saved_with_a_model_it_comes_back(tmp_path):
    model = small_model(SmallModelConfig(layers=1, width=16, heads=2, feed_forward=16), TOKENIZER)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = load_policy(tmp_path)[1]
    assert isinstance(tokenizer, TriadTokenizer) and tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer("4321;")["input_ids"] == ids("4321;") and tokenizer.eos_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("text", ["3½", "1,000", "٣", "1e5"])
def test_what_cannot_be_written_gets_a_sentence(text):
    with pytest.raises(InputError, match="triad tokenizer cannot write"):
        ids(text)


def test_a_decimal_point_must_be_in_the_alphabet():
    with pytest.raises(InputError, match=r"has '\.'"):
        small_tokenizer("triads", "0123456789+")("1.5")


def test_a_model_with_a_tokenizer_of_its_own_takes_no_other(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer is 'triads', .*'demo'"):
        check(TrainConfig(model="demo", tokenizer="triads", root=tmp_path))
