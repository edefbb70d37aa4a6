"""The formulas of `otb bench scale` against what calls of the library do, operation by operation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from benchmarks.config import LongConfig, ScaleConfig
from benchmarks.engine import model_config
from benchmarks.long import BEFORE as BEFORE_LONG
from benchmarks.long import DRAWN, GRADIENTS, random_rollouts
from benchmarks.publish import run_bench
from benchmarks.scale import Costs
from otb_analysis.config import ContrastSchedule
from otb_analysis.gradients import group_gradient_gram, signal_noise, sketch_score_norms, token_score_norms
from otb_analysis.gradients.batch.inputs import Batch, measured
from otb_analysis.gradients.groups import group_gram
from otb_analysis.gradients.groups.group_gram import prompts_of
from otb_analysis.gradients.manual import fast
from otb_analysis.measurement.level import contrasts

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
SIZES = {"small": (2, 64, 176, 256), "larger": (4, 128, 352, 512)}
PROMPTS, GROUP, BEFORE, TOKENS, ROWS = 4, 2, 8, 24, 2


def attended(q, k, v, dropout=0.0, causal=False, *args, out_val, **kwargs):
    """A CPU's fused attention, which PyTorch does not count; of a causal one half is left out."""
    return sdpa_flop_count(q.shape, k.shape, v.shape) // (1 + causal)


def attended_backward(grad, q, k, v, out, logsumexp, dropout, causal, *args, out_val, **kwargs):
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape) // (1 + causal)


FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
COUNTS = flop_registry | {
    FUSED: attended,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attended_backward,
}


class Counted(TorchDispatchMode):
    """Adds up the operations of matrix products and of attention."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (count := COUNTS.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def counted(call):
    call()  # the first call also checks the model
    with Counted() as mode:
        call()
    return mode.total


class Short(Costs):
    """Attention of short texts forms the masked half of its square, too."""

    @property
    def attention(self):
        return 2 * super().attention


def costs_of(processes=1, **sizes):
    return Short(group_size=GROUP, prompt_tokens=BEFORE, tokens=TOKENS, rows=ROWS, processes=processes, **sizes)


@pytest.fixture(params=SIZES)
def case(request):
    return made(request.param)


def made(size, group=GROUP, tokens=TOKENS):
    layers, width, inner, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=width // 4, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.randint(3, vocabulary, (PROMPTS * group, BEFORE + tokens))
    ids[:, :BEFORE] = ids[::group, :BEFORE].repeat_interleave(group, 0)
    mask = (torch.arange(BEFORE + tokens) >= BEFORE).expand_as(ids)
    costs = costs_of(layers=layers, width=width, inner=inner, vocabulary=vocabulary, prompts=PROMPTS)
    costs = replace(costs, group_size=group, tokens=tokens)
    return Qwen3ForCausalLM(config).eval(), ids, mask, costs


def test_operations_of_a_training_step(case):
    model, ids, _, costs = case
    whole = 6 * (costs.through + costs.embedding) * ids.numel()  # the model reads prompts again, and scores them
    found = counted(lambda: torch.autograd.grad(model(input_ids=ids).logits.sum(), list(model.parameters())))
    assert found == pytest.approx(whole, rel=0.05)
    assert costs.training < whole


def test_operations_of_every_estimators_gradient(case):
    model, ids, mask, costs = case
    weights = np.random.default_rng(0).normal(size=(len(ids), ROWS, ids.shape[1]))
    group = np.repeat(np.arange(PROMPTS), GROUP)
    found = counted(lambda: group_gradient_gram(model, ids, mask, weights, group))
    assert found == pytest.approx(costs.gram(costs.one_round), rel=0.1)


def test_operations_of_all_norms_are_at_most_those_of_the_formula(case):
    model, ids, mask, costs = case
    found = counted(lambda: token_score_norms(model, ids, mask, engine="generic"))
    assert 0.5 < found / costs.norms < 1.1


def test_operations_of_sketched_norms_attribution_and_contrasts(case):
    model, ids, mask, costs = case
    for directions in (16, 32):
        found = counted(lambda k=directions: sketch_score_norms(model, ids, mask, directions=k, method="hybrid"))
        assert found == pytest.approx(replace(costs, directions=directions).sketch, rel=0.1)
    weights, group = np.random.default_rng(0).normal(size=ids.shape), np.repeat(np.arange(PROMPTS), GROUP)
    found = counted(lambda: signal_noise(model, ids, mask, weights, group))
    assert found == pytest.approx(costs.attribution, rel=0.1)


@pytest.mark.parametrize("tokens", [120, 504])
def test_operations_of_attention_are_those_of_its_square_or_of_the_half_that_is_not_masked(tokens):
    """Of groups of one: rollouts of a prompt in one packed row would form products with each other, too."""
    model, ids, mask, short = made("small", group=1, tokens=tokens)
    weights, group = np.random.default_rng(0).normal(size=(PROMPTS, ROWS, ids.shape[1])), np.arange(PROMPTS)
    assert short.attention > 0.3 * short.blocks
    calls = {
        "gram": lambda: group_gradient_gram(model, ids, mask, weights, group),
        "sketch": lambda: sketch_score_norms(model, ids, mask, directions=short.directions, method="hybrid"),
        "attribution": lambda: signal_noise(model, ids, mask, weights[:, 0], group),
    }
    for name, call in calls.items():
        half, whole = (getattr(one, name) for one in (Costs(**vars(short)), short))
        if name == "gram":
            half, whole = half(short.one_round), whole(short.one_round)
        assert 0.97 * half < counted(call) < 1.03 * whole, name


def test_operations_of_contrasts(case, monkeypatch):
    model, *_, costs = case
    monkeypatch.setattr("otb_analysis.measurement.level.FEWEST", 1)
    shape = LongConfig(prompts=PROMPTS, group_size=4)
    rollouts, right = random_rollouts(model.config.vocab_size, shape, TOKENS), np.arange(4 * PROMPTS) % 2 == 0
    found = counted(lambda: contrasts(model, rollouts, right, ContrastSchedule(1, steps=3, batch=2), 0))
    costs = replace(costs, group_size=4, prompt_tokens=BEFORE_LONG, steps=3, batch=2)
    assert found == pytest.approx(sum(costs.contrast), rel=0.1)


def test_signals_are_what_the_library_counts_before_it_shares_prompts_out(case):
    model, ids, mask, costs = case
    weights = np.random.default_rng(0).normal(size=(len(ids), ROWS, ids.shape[1])) * mask.numpy()[:, None]
    with measured(model, Batch(ids, mask), "all", 1.0) as batch:
        prompts = prompts_of(batch, weights, np.repeat(np.arange(PROMPTS), GROUP))
    assert sum(prompt.signals(4 * costs.width) for prompt in prompts) == costs.one_round.held


class Held(TorchDispatchMode):
    """The most bytes at once of tensors that were made inside."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.live:
                self.live.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def __enter__(self):
        self.live = set()
        return super().__enter__()

    def gone(self, storage, size):
        self.live.discard(storage)
        self.now -= size


def most_held(call):
    call()  # the first call also checks the model
    with Held() as mode:
        call()
    return mode.most


@pytest.mark.parametrize("tokens", [56, 504])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_that_are_held_follow_the_formulas(size, tokens, monkeypatch):
    model, ids, mask, costs = made(size, group=1, tokens=tokens)
    costs = replace(costs, heads=4)
    weights = np.random.default_rng(0).normal(size=ids.shape)
    one, two = (ids[:1], mask[:1]), (ids[:2], mask[:2])
    found = most_held(lambda: sketch_score_norms(model, *one, method="hybrid"))
    assert found == pytest.approx(costs.sketch_held, rel=0.3)
    found = most_held(lambda: signal_noise(model, *two, weights[:2], np.arange(2)))
    assert found == pytest.approx(costs.attribution_held, rel=0.3)
    with measured(model, Batch(*one), "all", 1.0) as batch:
        assert costs.norms_held == pytest.approx(fast.needed_bytes(batch, False), rel=0.03)
    assert most_held(lambda: token_score_norms(model, *one, engine="fast")) < costs.norms_held
    monkeypatch.setattr("otb_analysis.measurement.level.FEWEST", 1)
    shape = LongConfig(prompts=PROMPTS, group_size=4)
    rollouts, right = random_rollouts(model.config.vocab_size, shape, tokens), np.arange(4 * PROMPTS) % 2 == 0
    found = most_held(lambda: contrasts(model, rollouts, right, ContrastSchedule(1, steps=3, batch=2), 0))
    costs = replace(costs, prompt_tokens=BEFORE_LONG, batch=2)
    assert found == pytest.approx(costs.contrast_held, rel=0.2)


@pytest.mark.parametrize("share", [3, 1.9, 0.8, 0.6])
def test_rounds_are_those_in_which_the_library_packs_signals(case, share, monkeypatch):
    model, ids, mask, costs = case
    costs, free = replace(costs, rows_alone=ROWS), int(costs.one_round.held * share)
    monkeypatch.setattr(group_gram, "free_bytes", lambda device: free)
    weights = np.random.default_rng(0).normal(size=(len(ids), ROWS, ids.shape[1])) * mask.numpy()[:, None]
    with measured(model, Batch(ids, mask), "all", 1.0) as batch:
        parts, bins = group_gram.bins_of(batch, prompts_of(batch, weights, np.repeat(np.arange(PROMPTS), GROUP)))
    way = costs.packed(free)
    assert way.rounds == max(len(bins) * (len(bins) - 1) // 2, 1)
    assert (way.rounds == 1) == (share > 2)
    assert way.cut == (len(parts) > PROMPTS)


@pytest.mark.parametrize("name", ["long", "long_M_float32"])
def test_seconds_of_measured_levels_follow_the_formulas(name):
    """Their ratios to a forward and backward pass of the same rollouts, which each read their prompt."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    sizes: dict[str, Any] = {"prompts": 2, "group_size": 8, "prompt_tokens": BEFORE_LONG}
    config, seen = Qwen2Config(**model_config("M" if "_M_" in name else "S")), set()
    # Every head is taken to have keys and values of its own.
    shape = {"layers": config.num_hidden_layers, "width": config.hidden_size, "inner": config.intermediate_size}
    for row in report["rows"]:
        costs = Costs(vocabulary=config.vocab_size, processes=1, tokens=row["tokens"], **shape, **sizes)
        each = {
            GRADIENTS: costs.gram(costs.one_round), DRAWN: costs.drawn_norms, "sketch": costs.sketch,
            "attribution": costs.attribution,
        }  # fmt: skip
        if row["what"] in each and row["tokens"] >= 64:
            seen.add(row["what"])
            whole = 6 * (costs.through * costs.positions + costs.embedding * costs.sampled)
            assert 0.7 < row["passes"] / (each[row["what"]] / whole) < 2.5, row
    assert seen == {GRADIENTS, DRAWN, "sketch", "attribution"}


def test_more_processes_hold_less_and_send_more():
    sizes = {"layers": 2, "width": 64, "inner": 176, "vocabulary": 256, "prompts": 8}
    one, four = (costs_of(processes, **sizes) for processes in (1, 4))
    whole, part = one.one_round, four.one_round
    assert one.sent(whole) == 0 and part.held == whole.held / 4
    assert four.sent(part) == 4 * 2 * 2 * (four.blocks + 2 * four.embedding) * 3 / 4


def test_the_table_has_a_row_for_each_level():
    report = run_bench(ScaleConfig())
    assert [row["ratio"] for row in report.rows][:2] == [1.0, 0.0]
    assert report.title.startswith("On paper: 6.7 billion parameters")
