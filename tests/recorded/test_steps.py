"""A stream of records becomes steps of whole groups; what is not in groups is refused by its record."""

from pathlib import Path

import pytest

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Place, RecordedRollout
from otb_analysis.recorded.runs import Layout, steps_of


def records(*rows):
    """Rollouts by (prompt, group, step)."""
    for number, (prompt, group, step) in enumerate(rows, start=1):
        yield RecordedRollout(
            Place(Path("r.jsonl"), number), 0.0, prompt=prompt, completion="1", group=group, step=step
        )


def cut(*rows, **layout):
    steps = steps_of(records(*rows), Layout(**layout))
    return [(step.step, [r.place.number for r in step.records], step.group.tolist()) for step in steps]


def test_records_without_steps_are_cut_after_so_many_groups():
    rows = [(prompt, None, None) for prompt in "aabbbcdd"]
    assert cut(*rows, prompts=2) == [(0, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), (1, [6, 7, 8], [0, 1, 1])]


def test_named_steps_may_interleave_their_groups_and_come_out_group_by_group():
    rows = [("a", 7, 3), ("b", 9, 3), ("a", 7, 3), ("c", 7, 5)]
    assert cut(*rows) == [(3, [1, 3, 2], [0, 0, 1]), (5, [4], [0])]


def test_a_group_size_cuts_rows_in_a_row():
    rows = [(prompt, None, None) for prompt in "aabbcc"]
    assert cut(*rows, prompts=2, group_size=2) == [(0, [1, 2, 3, 4], [0, 0, 1, 1]), (1, [5, 6], [0, 0])]


def test_a_stream_is_read_no_further_than_its_step():
    read = []

    def endless():
        for number in range(1, 10**9):
            read.append(number)
            yield RecordedRollout(Place(Path("r"), number), 0.0, prompt=str(number // 2), completion="1")

    first = next(iter(steps_of(endless(), Layout(prompts=4))))
    assert len(first.records) == 7 and len(read) == 8


def test_prompts_have_one_name_in_all_steps():
    steps = list(steps_of(records(("a", 0, 0), ("b", 1, 0), ("b", 0, 1)), Layout()))
    assert steps[0].prompt_ids[1] == steps[1].prompt_ids[0] != steps[0].prompt_ids[0]


A, B = ("a", None, 0), ("b", None, 0)
REFUSED = {
    "a group in two pieces": ([("a", 1, None), ("b", 2, None), ("a", 1, None)], {}, "record 3 .*group 1 of record 1"),
    "a prompt in two pieces": ([(p, None, None) for p in "aba"], {}, "record 3 .*prompt of record 1"),
    "a group of two prompts": ([("a", 1, 0), ("b", 1, 0)], {}, "record 2 is in the group of record 1 but has another"),
    "a wrong group size": ([A, B], {"group_size": 2}, "--group-size"),
    "steps that go back": ([("a", 1, 4), ("b", 1, 2)], {}, "record 2 is of step 2 but comes behind step 4"),
    "a part of a step again": (
        [("a", 1, 4), ("a", 1, 4), ("b", 1, 5), ("a", 1, 4)],
        {},
        "goes on with step 4, of which",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_records_that_are_in_no_groups_are_refused(what):
    rows, layout, sentence = REFUSED[what]
    with pytest.raises(InputError, match=sentence):
        cut(*rows, **layout)


def test_a_question_twice_among_single_rollouts_stays_single():
    assert cut(("a", 1, 0), ("b", 2, 0), ("a", 3, 0)) == [(0, [1, 2, 3], [0, 1, 2])]
    # Where every prompt repeats, each rollout was named a group of its own.
    assert cut(("a", 1, 0), ("b", 2, 0), ("a", 3, 0), ("b", 4, 0)) == [(0, [1, 3, 2, 4], [0, 0, 1, 1])]


def test_groups_of_many_sizes_are_not_cut():
    rows = [(prompt, None, 0) for prompt in "aabbbbcccccc"]
    assert cut(*rows)[0][2] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    # Most are of two here, in no order: the one of four is a question that stands twice.
    assert cut(*((prompt, None, 0) for prompt in "abcabcaa"))[0][2] == [0, 0, 1, 1, 2, 2, 3, 3]
