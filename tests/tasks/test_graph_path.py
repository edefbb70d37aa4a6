"""Walks: every way that arrives is right, whatever its length, and nothing else."""

import pytest

from otb_analysis.config import GraphPathConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks import GraphPath, Prompt, Turn, base

#   a – b – c – d,  a – c
LITERAL = Prompt(id="ab,cb,cd,ac:a>d=", text="ab,cb,cd,ac:a>d=", answer="acd")


def paid(text, finished=True, **settings):
    (parts,) = GraphPath(GraphPathConfig(**settings)).reward(LITERAL, [Turn(text, finished)])
    return parts["correct"]


@pytest.mark.parametrize("text", ["acd", "abcd", "acbabcd", "acdcd", "acacacacd"])
def test_any_walk_along_edges_from_start_to_goal_is_right(text):
    assert paid(text) == 1.0


@pytest.mark.parametrize(
    "text",
    ["ad", "abd", "cd", "ac", "bcd", "acdc", "aacd", "acdd", "acd=", " acd", "acd\n", "a", "d", "", "acde", "ACD"],
)
def test_leaps_other_ends_and_other_signs_are_wrong(text):
    assert paid(text) == 0.0


def test_walk_without_the_end_token_is_not_paid():
    assert paid("acd", finished=False) == 0.0


def test_directed_edges_lead_one_way():
    # ab, cb, cd, ac: a → c → d; b leads nowhere.
    assert paid("acd", directed=True) == 1.0
    assert paid("abcd", directed=True) == 0.0


@pytest.mark.parametrize("directed", [False, True])
def test_every_demonstration_is_a_path_without_repetition_that_earns_the_reward(directed):
    task = GraphPath(GraphPathConfig(nodes=8, edges=14, directed=directed), seed=1)
    longer = 0
    for i in range(150):
        prompt = task.prompt("train", i)
        (turn,) = task.demonstration(prompt)
        assert task.reward(prompt, [turn]) == task.reward(prompt, [Turn(prompt.answer, True)]) == [{"correct": 1.0}]
        assert len(set(turn.text)) == len(turn.text)
        assert set(prompt.text + turn.text) <= set(task.alphabet)
        assert len(prompt.answer) <= len(turn.text)
        assert task.demonstration(prompt) == [turn]
        longer += len(turn.text) > len(prompt.answer)
    assert longer > 30  # right answers of different lengths are shown


def test_settings_bound_the_graph_and_the_distance():
    task = GraphPath(GraphPathConfig(nodes=5, edges=6, distance_min=3))
    for i in range(50):
        prompt = task.prompt("train", i)
        edges = prompt.text.partition(":")[0].split(",")
        assert len({frozenset(edge) for edge in edges}) == 6
        assert set("".join(edges)) <= set("abcde")
        assert len(prompt.answer) - 1 >= 3


def canonical(text):
    edges, ends = text.split(":")
    return frozenset(frozenset(edge) for edge in edges.split(",")), ends


def test_splits_share_no_problem_and_a_problem_is_always_the_same():
    small = GraphPathConfig(nodes=4, edges=4)
    split = {
        name: {canonical(GraphPath(small, seed).prompt(name, i).text) for seed in range(2) for i in range(60)}
        for name in ("train", "heldout")
    }
    assert not split["train"] & split["heldout"]
    assert split["heldout"]
    # Of 4 nodes and 4 edges 15 graphs can be drawn; with their ends some 100 problems, in 4!·2⁴ orders each.
    task = GraphPath(small)
    prompts = [task.prompt("train", i) for i in range(150)]
    assert len({p.id for p in prompts}) == len({canonical(p.text) for p in prompts}) < len({p.text for p in prompts})
    assert GraphPath(small, 5).prompt("train", 13) == GraphPath(small, 5).prompt("train", 13)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"nodes": 2}, "nodes is 2"),
        ({"nodes": 27}, "nodes is 27"),
        ({"nodes": 4, "edges": 7}, "edges is 7 but 4 nodes have 6 pairs"),
        ({"edges": 1}, "edges is 1"),
        ({"distance_min": 0}, "distance_min is 0"),
        ({"nodes": 4, "edges": 5, "distance_min": 4}, "distance_min is 4"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(InputError, match=named):
        GraphPath(GraphPathConfig(**settings))


def test_distance_that_no_graph_of_this_size_has_is_one_sentence(monkeypatch):
    monkeypatch.setattr(base, "MOST_DRAWS", 100)
    # All 6 pairs of 4 nodes: every distance is 1.
    with pytest.raises(InputError, match="no problem for the train split"):
        GraphPath(GraphPathConfig(nodes=4, edges=6)).prompt("train", 0)
