"""Which device a name stands for, what is said of it, and that no tensor is made on a device by default."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from otb_analysis import devices
from otb_analysis.commands.cli import main
from otb_analysis.commands.demo import is_complete
from otb_analysis.config import AttributionSchedule, MeasureConfig, SampledSchedule, Schedule, SketchSchedule
from otb_analysis.devices import COARSE, DEVICE, device_of, products, random_forked, use, working_set
from otb_analysis.errors import InputError
from otb_analysis.gradients import group_gradient_gram
from otb_analysis.gradients.exact import verdicts as module
from otb_analysis.gradients.exact.verdicts import arithmetic
from otb_analysis.phases import NOTES
from otb_analysis.processes import Processes
from otb_analysis.store import RunStore
from otb_analysis.store.layout import read_run_file, write_run_file
from otb_analysis.training.loop import train, train_step
from tests.second_device import second_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    """`auto` means what it means by itself; benchmarks that ran before may have said otherwise."""
    monkeypatch.delenv(DEVICE, raising=False)


@pytest.fixture
def accelerator(monkeypatch):
    """Let PyTorch say that this machine has two accelerators of a kind."""

    def appear(kind="cuda"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        # PyTorch's optimizers ask what they would capture there.
        monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None)

    return appear


@pytest.fixture
def moved(monkeypatch):
    """Where models were sent; they stay where they are."""
    places = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device, *more, **kinds: (places.append(str(device)), self)[1])
    return places


def test_auto_is_the_accelerator_and_else_the_cpu(accelerator):
    assert device_of() == CPU
    accelerator()
    assert (device_of(), device_of("cuda:1"), device_of("cpu")) == (CUDA, torch.device("cuda:1"), CPU)


def test_auto_never_measures_where_there_is_no_float64(accelerator):
    accelerator("mps")
    assert (device_of(), device_of(measures=False)) == (CPU, torch.device("mps"))
    assert device_of("mps", measures=False) == torch.device("mps")
    with pytest.raises(InputError, match=r"mps, which has no float64, .*--device cpu"):
        device_of("mps")


@pytest.mark.parametrize(
    ("name", "there", "sentence"),
    [
        (
            "cuda",
            None,
            "--device is cuda but PyTorch .* sees no accelerator on this machine; pass --device auto or cpu",
        ),
        ("mps", "cuda", "--device is mps but PyTorch .* sees cuda on this machine; "),
        ("cuda:2", "cuda", "--device is cuda:2 but this machine has 2 of them; pass a number below 2"),
        ("gpu", None, "--device is 'gpu'; pass auto, cpu, cuda, cuda:N with N from 0, or mps"),
        ("cuda:x", None, "--device is 'cuda:x'; pass "),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(accelerator, name, there, sentence):
    if there:
        accelerator(there)
    with pytest.raises(InputError, match=f"^{sentence}"):
        device_of(name)


def test_auto_means_what_a_study_or_benchmark_uses(accelerator, monkeypatch):
    accelerator()
    monkeypatch.setenv(DEVICE, "cpu")
    assert (use("auto"), device_of(), device_of("cuda")) == (CPU, CPU, CUDA)


@pytest.mark.parametrize(
    "words",
    [
        "train",
        "demo --no-serve",
        "score --model demo --rollouts x.jsonl",
        "audit --model demo --rollouts x.jsonl",
        "bench gram",
    ],
)
def test_every_command_refuses_it_before_it_begins(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "completion": "2", "reward": 1.0, "group": 0}\n' * 2)
    assert main([*words.split(), "--device", "cuda"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("otb: --device is cuda but PyTorch ")
    assert not (tmp_path / "runs").exists()


def test_a_study_says_where_its_models_run_and_refuses_a_device_that_is_not_there(capsys):
    assert main(["study", "00_training", "--device", "cuda"]) == 2
    assert "--device is cuda but PyTorch" in capsys.readouterr().err


def test_a_run_is_moved_and_says_first_where_it_is(tiny_config, tmp_path, accelerator, moved):
    accelerator()
    NOTES.clear()
    path = train(replace(tiny_config, run="auto", root=tmp_path))
    assert moved[0] == "cuda"  # the policy; here it stays where it was, and that is what the run says
    assert NOTES[0] == "Device: cpu; gradients are measured in float32."
    assert RunStore(path).info["machine"] == {"device": "cpu", "precision": "float32"}
    moved.clear()
    train(replace(tiny_config, run="cpu", root=tmp_path, device="cpu"))
    assert moved[0] == "cpu"


def test_each_of_several_processes_keeps_a_device_of_its_own(monkeypatch, accelerator):
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator()
    with pytest.raises(InputError, match=r"cuda:1 .* several processes"):
        Processes.joined(False, "cuda:1")


def test_a_run_goes_on_elsewhere_with_a_sentence(tiny_config, tmp_path):
    config = replace(tiny_config, run="moved", root=tmp_path, checkpoint=replace(tiny_config.checkpoint, every=1))
    path = train(config)
    store = RunStore(path)
    assert store.info["machine"] == {"device": "cpu", "precision": "float32"}
    write_run_file(path, read_run_file(path) | {"machine": {"device": "cuda:0 (A Card)", "precision": "float32"}})
    NOTES.clear()
    longer = replace(config, optimize=replace(config.optimize, steps=4), if_exists="resume", device="cpu")
    train(longer)
    assert any("begun on cuda:0 (A Card) and goes on on cpu" in sentence for sentence in NOTES)
    assert RunStore(path).info["resumed"][-1]["machine"]["device"] == "cpu"


def test_a_demo_that_was_made_on_any_device_is_reused(tiny_config, tmp_path):
    config = replace(tiny_config, run="demo", root=tmp_path)
    train(config)
    assert is_complete(replace(config, device="cpu"))
    assert not is_complete(replace(config, precision="tf32"))


LEVELS = {
    "fast": MeasureConfig(exact=Schedule(1), sampled=SampledSchedule(1), attribution=AttributionSchedule(1)),
    "generic": MeasureConfig(exact=Schedule(1), engine="generic"),
    "reference, sketched": MeasureConfig(exact=Schedule(1), engine="reference", gram="sketch"),
    **{
        f"sketch {method}": MeasureConfig(exact=Schedule(), sketch=SketchSchedule(1, directions=4, method=method))
        for method in ("hybrid", "rank_one", "gaussian")
    },
}


@pytest.mark.parametrize("measure", LEVELS.values(), ids=LEVELS)
def test_no_tensor_is_made_on_the_default_device(made, one_thread, measure):
    # A tensor that is made without a device holds nothing here, and the first operation with it fails.
    expected = train_step(made(measure=measure), 0)
    trainer = made(measure=measure)
    torch.set_default_device("meta")
    try:
        found = train_step(trainer, 0)
    finally:
        torch.set_default_device(None)
    assert found.steps["measurement_gaps"] == 0
    for name in ("logprob", "grad_norm_sq", "attribution"):
        if name in expected.tokens:
            theirs, ours = (np.ma.filled(np.ma.asarray(x.tokens[name], float), 0.0) for x in (found, expected))
            np.testing.assert_array_equal(theirs, ours)


def test_what_stays_in_a_cpu_s_cache_grows_elsewhere():
    assert (working_set(CPU, 512), working_set(CUDA, 512), working_set(CUDA, 512, 8)) == (512, 32 * 512, 8 * 512)


def test_random_states_are_put_back():
    before = torch.get_rng_state()
    with random_forked(CPU):
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    with random_forked(CPU, enabled=False):
        torch.rand(3)
    assert not torch.equal(before, torch.get_rng_state())


class Coarse(torch.utils._python_dispatch.TorchDispatchMode):
    """Products of a processor that obeys: while PyTorch is told to, factors are rounded to so many bits."""

    def __init__(self, bits):
        super().__init__()
        self.scale = float(2**bits)

    def _rounded(self, x):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * self.scale).round() / self.scale, exponent)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        products = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
        if products and torch.get_float32_matmul_precision() != "highest":
            args = [self._rounded(x) for x in args]
        return func(*args, **(kwargs or {}))


def test_precision_is_float32_unless_asked_and_where_a_processor_does_not_obey(tiny_model, monkeypatch):
    assert arithmetic(tiny_model, "float32") == ("float32", "")
    monkeypatch.setattr(module, "forms_products", lambda device, name: False)
    assert arithmetic(tiny_model, "tf32") == (
        "float32",
        "PyTorch forms no tf32 products of float32 numbers on this cpu",
    )


def test_coarse_products_are_used_where_the_probe_agrees(tiny_model):
    with Coarse(bits=11):
        assert devices.forms_products(CPU, "tf32") and not devices.forms_products(CPU, "float32")
    with Coarse(bits=22):
        assert not devices.forms_products(CPU, "tf32")


@pytest.mark.parametrize(("bits", "used"), [(20, "tf32"), (8, "float32")])
def test_the_probe_decides(tiny_model, monkeypatch, bits, used):
    monkeypatch.setattr(module, "forms_products", lambda device, name: True)
    with Coarse(bits):
        found, why = arithmetic(tiny_model, "tf32")
    assert found == used
    assert ("agree" in why) if used == "tf32" else ("with tf32 products" in why or "on a probe" in why)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_measures_in_what_it_says(tiny_config, tmp_path, monkeypatch):
    seen = set()

    def watched(*args, **more):
        seen.add(torch.get_float32_matmul_precision())
        return group_gradient_gram(*args, **more)

    monkeypatch.setattr(module, "forms_products", lambda device, name: True)
    monkeypatch.setattr("otb_analysis.measurement.measurer.group_gradient_gram", watched)
    NOTES.clear()
    path = train(replace(tiny_config, run="tf32", root=tmp_path, precision="tf32"))
    assert seen == {"high"} and torch.get_float32_matmul_precision() == "highest"
    assert RunStore(path).info["machine"]["precision"] == "tf32"
    assert NOTES[0].startswith(
        "Device: cpu; gradients are measured in tf32, because on a probe the norms of scores agree"
    )


def test_bfloat16_products_are_refused_where_pytorch_has_none(tiny_model):
    with second_device() as device:
        tiny_model.to(device)
        with pytest.raises(InputError, match=r"bfloat16, but .* on meta .*tf32"):
            arithmetic(tiny_model, "bfloat16")


def test_products_are_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), products("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == "highest"
    assert COARSE != 1
