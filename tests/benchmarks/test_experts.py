import pytest

from benchmarks import experts
from benchmarks.config import ExpertsConfig
from benchmarks.engine import SIZES
from benchmarks.publish import run_bench
from otb_analysis.errors import InputError


def test_a_mixture_has_as_many_active_parameters_as_the_dense_model():
    dense, mixture = experts.models_of("S", 4)
    layer = sum(p.numel() for p in dense.model.layers[0].mlp.parameters())
    routed = sum(p.numel() for p in mixture.model.layers[0].mlp.experts.parameters())
    assert routed == 4 / experts.CHOSEN * layer
    total, mixed = (sum(p.numel() for p in model.parameters()) for model in (dense, mixture))
    routers = sum(layer.mlp.gate.weight.numel() for layer in mixture.model.layers)
    assert mixed - total == 4 * (routed - layer) + routers


def test_every_row_holds_both_times_and_their_ratio(monkeypatch):
    monkeypatch.setitem(SIZES, "S", SIZES["S"] | {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64})
    report = run_bench(ExpertsConfig(sizes=("S",), tokens=(40,), repeats=1))
    assert report.command == "otb bench experts --sizes S --tokens 40 --experts 4 --repeats 1"
    assert [row["what"] for row in report.rows] == [
        "forward + backward", "exact norms, generic", "exact norms, path=True", "Gram matrix", "attribution"
    ]  # fmt: skip
    assert all(row["ratio"] == pytest.approx(row["mixture"] / row["dense"]) for row in report.rows)


def test_no_experts_are_refused():
    with pytest.raises(InputError, match="experts is 0"):
        run_bench(ExpertsConfig(experts=0))
