import torch

from benchmarks import sampling_check
from benchmarks.config import SamplingCheckConfig
from benchmarks.publish import run_bench
from benchmarks.sampling_check import planted_rollouts, repetition, top_k
from otb_analysis.tasks import Prompt


def test_every_fault_is_a_row_with_and_without_recorded_log_probabilities(monkeypatch):
    monkeypatch.setattr(sampling_check, "PROMPTS", 2)
    monkeypatch.setattr(sampling_check, "newer_policy", lambda updates, root: sampling_check.load_policy("demo")[0])
    report = run_bench(SamplingCheckConfig(tokens=100, repeats=1, clean=2, updates=3))
    assert [row["recorded"] for row in report.rows] == ["no", "yes"] * 6
    clean, *faults = report.rows[::2]
    assert clean["audits"] == 2 and clean["named"] is None
    assert [row["fault"] for row in faults][-1] == "3 steps old checkpoint"
    assert all(row["audits"] == 1 and row["tokens"] >= 100 and row["tied"] in (0, 1) for row in faults)
    assert len(report.cells) == 12


def test_a_changed_sampler_records_its_own_log_probabilities(tiny_model, tokenizer):
    prompts = [Prompt("a", "1+1=", ""), Prompt("b", "1=", "")]
    torch.manual_seed(0)
    rollouts = planted_rollouts(tiny_model, tokenizer, prompts, 2, 6, top_k(1))
    inside = rollouts.mask
    assert (rollouts.behavior_logprob[inside] == 0).all()  # the one token that is left has probability 1
    assert rollouts.prompt_length.tolist() == [4, 4, 2, 2]


def test_a_repetition_penalty_reads_no_padding():
    ids, real = torch.tensor([[0, 2, 1]]), torch.tensor([[False, True, True]])
    changed = repetition(2.0)(ids, real, torch.tensor([[4.0, 4.0, -4.0, 4.0]]))
    assert changed.tolist() == [[4.0, 2.0, -8.0, 4.0]]


def test_seeds_repeat(tiny_model, tokenizer):
    def draw():
        torch.manual_seed(3)
        return planted_rollouts(tiny_model, tokenizer, [Prompt("a", "1+1=", "")], 3, 5).input_ids.tolist()

    assert draw() == draw()
