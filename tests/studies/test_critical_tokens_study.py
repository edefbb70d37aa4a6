"""Study 11: effects by continuing rollouts, and rank correlations by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.rollouts.generation import Generation
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime import silent
from studies.lib import select
from studies.lib.policies import fresh_policy, write
from studies.lib.record import load_study

NAMES = load_study(Path(__file__).parent.parent.parent / "studies" / "11_critical_tokens").names
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=16),
    chain_sum=ChainSumConfig(terms_max=2, largest=20),
)


@pytest.fixture(scope="module")
def written():
    policy = fresh_policy(CONFIG)
    prompts = distinct_prompts(policy.task, "train", 2)
    return policy, write(policy, prompts, SampleConfig(prompts=2, group_size=2, max_new_tokens=5), seed=0)


def test_another_token_is_never_the_one_that_was_written(written):
    policy, _ = written
    ids = policy.tokenizer("3+4=")["input_ids"]
    token = np.arange(len(policy.tokenizer))
    drawn = NAMES["others"](policy, [list(ids)] * len(token), token, 40)
    assert drawn.shape == (len(token), 40) and (drawn != token[:, None]).all()


class Scripted:
    """A generator that ends every answer with the right sum, and counts what it was asked for."""

    def __init__(self, policy, prompt):
        self.ends, self.asked = [policy.tokenizer.eos_token_id], 0
        self.answer = policy.tokenizer(f"#{prompt.answer}", add_special_tokens=False)["input_ids"]

    def generate(self, contexts, most, temperature):
        self.asked += len(contexts)
        return [Generation([*self.answer, *self.ends], [], True) for _ in contexts]


def test_continuations_are_paid_by_the_task_and_ended_ones_are_not_continued(written):
    policy, found = written
    rollouts = found.rollouts
    generator, begun = (
        Scripted(policy, rollouts.prompts[0]),
        rollouts.input_ids[0, : rollouts.prompt_length[0]].tolist(),
    )
    digit = policy.tokenizer("9", add_special_tokens=False)["input_ids"][0]
    follow = np.array([[digit, policy.tokenizer.eos_token_id]])  # 9#… is right, an empty answer is not
    share = NAMES["successes"](policy, generator, rollouts, np.array([0]), [begun], follow, 0.5, 4)
    assert share.tolist() == [0.5] and generator.asked == 1


def test_effects_of_a_policy_that_never_is_right_are_zero_where_chosen(written):
    policy, found = written
    chosen = found.table.mask & (np.arange(4) % 2 == 0)[:, None]
    before = torch.get_rng_state()
    kept, other = NAMES["token_effects"](policy, found.rollouts, chosen, 2.0, 3, 5, 1, silent)
    assert torch.equal(before, torch.get_rng_state())
    for x in (kept, other):
        assert (x[chosen] == 0).all() and np.isnan(x[~chosen]).all()


def planted(n: int = 400) -> list[dict]:
    """Tokens of wrong rollouts: the contrast knows which ruin the answer, log π and attribution know nothing."""
    random = np.random.default_rng(1)
    rows = []
    for i in range(n):
        ruins = i % 20 == 0
        rows.append(
            {"prompt": i // 10, "right": False, "logprob": -random.random(), "norm": 1.0, "replaced": 1.0}
            | {
                "contrast": 0.01 if ruins else 0.5 + random.random() / 2,
                "kept": 0.0 if ruins else 0.6 + random.random() / 3,
            }
            | {name: random.normal() for name in ("attribution", "signal", "noise")}
        )
    return rows


def test_correlations_follow_from_the_sums_of_a_cell_and_are_spearmans():
    tokens = planted()
    sums = select(NAMES["summaries"](tokens)["sums"], kind="wrong")
    effect = [token["kept"] - token["replaced"] for token in tokens]
    for name in ("contrast", "logprob", "attribution", "noise"):
        found = NAMES["correlation"](sums, name, "effect")
        expected = spearmanr([token[name] for token in tokens], effect).statistic
        assert found.estimate == pytest.approx(expected, abs=2e-3)  # but for rounded sums
        assert found.low < found.estimate < found.high
    less = NAMES["correlation"](sums, "contrast", "effect", "logprob")
    both = [NAMES["correlation"](sums, name, "effect").estimate for name in ("contrast", "logprob")]
    assert less.estimate == pytest.approx(both[0] - both[1], rel=1e-9)
    size = NAMES["correlation"](sums, "uncertain", "size")
    expected = spearmanr([1 - np.exp(token["logprob"]) for token in tokens], np.abs(effect)).statistic
    assert size.estimate == pytest.approx(expected, abs=2e-3)


def test_what_ruins_an_answer_is_found_by_the_score_that_knows_it():
    row = NAMES["decisive"](NAMES["summaries"](planted(800))["found"], "p")
    assert row["decisive"] == 40 and row["tokens"] == 800 and row["found_by_contrast"] == 1.0
    assert row["found_by_logprob"] < 0.4 and row["found_by_logprob_low"] is not None
    assert row["more"] == pytest.approx(1 - row["found_by_logprob"], abs=1e-4)
    few = NAMES["decisive"](NAMES["found_rows"](planted(400)), "p")
    assert few["decisive"] == 20 and few["found_by_contrast"] == 1.0 and few["found_by_logprob_low"] is None


def test_fifths_hold_all_tokens_and_the_lowest_of_the_contrast_has_the_lowest_effect():
    rows = select(NAMES["summaries"](planted())["fifths"], score="contrast")
    assert [row["fifth"] for row in rows] == [1, 2, 3, 4, 5] and sum(row["tokens"] for row in rows) == 400
    assert min(rows, key=lambda row: row["effect"])["fifth"] == 1


def test_without_right_and_wrong_answers_nothing_is_chosen(written):
    _, found = written
    with pytest.raises(InputError, match="right and wrong"):
        NAMES["chosen_tokens"](found, np.zeros(4, dtype=bool), 1, 0, 0)
