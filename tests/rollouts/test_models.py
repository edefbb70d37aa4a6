"""Policies: a small one made in code, and any checkpoint directory, or one sentence about why not."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
)

from otb_analysis.config import SmallModelConfig, WarmStartConfig
from otb_analysis.errors import InputError
from otb_analysis.rollouts.models import (
    END,
    PAD,
    UNKNOWN,
    character_tokenizer,
    load_policy,
    output_layer,
    small_model,
)
from otb_analysis.rollouts.named_models import SHIPPED

AWKWARD = "09+=;# \t\n\r\"'\\<>&é中😀\u0301\u200b"


def test_tokenizer_gives_back_every_character_of_its_alphabet_after_saving(tmp_path):
    character_tokenizer(AWKWARD).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = AWKWARD + " , " + AWKWARD[::-1] + "  . ' "
    known = "".join(c for c in text if c in AWKWARD)
    assert tokenizer.decode(tokenizer(known)["input_ids"]) == known
    assert len(tokenizer(known)["input_ids"]) == len(known)


def test_tokens_are_three_special_ones_and_the_alphabet_in_order_without_repetition():
    tokenizer = character_tokenizer("bab=")
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [PAD, END, UNKNOWN, "=", "a", "b"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_unknown_character_becomes_the_unknown_token_and_shifts_nothing(tokenizer):
    ids = tokenizer("1?é2")["input_ids"]
    assert ids[1] == ids[2] == tokenizer.unk_token_id
    assert tokenizer.decode([ids[0], ids[3]]) == "12"


def test_saved_model_comes_back_from_plain_from_pretrained_with_the_same_weights(tiny_model, tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path), load_policy(tmp_path)[0]):
        assert type(model) is type(tiny_model)
        for (name, a), (other, b) in zip(tiny_model.state_dict().items(), model.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(a, b)
    assert load_policy(tmp_path)[1]("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]


def test_seed_decides_the_weights_and_the_global_random_state_stays(tokenizer, tiny_settings):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (small_model(tiny_settings, tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(output_layer(first).weight, output_layer(other).weight)


def test_tied_model_shares_its_embedding_and_untied_does_not(tokenizer, tiny_settings):
    for tied in (True, False):
        model = small_model(SmallModelConfig(**{**vars(tiny_settings), "tied": tied}), tokenizer)
        assert (output_layer(model).weight is model.get_input_embeddings().weight) == tied


def test_default_model_has_half_a_million_to_a_million_parameters(tokenizer):
    assert 400_000 <= small_model(SmallModelConfig(), tokenizer).num_parameters() <= 1_000_000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"width": 18}, "width is 18"),
        ({"heads": 3, "width": 18, "key_value_heads": 2}, "key_value_heads"),
        ({"heads": 0}, "small_model.heads is 0"),
        ({"layers": -1}, "small_model.layers is -1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tokenizer, tiny_settings, settings, named):
    with pytest.raises(InputError, match=named):
        small_model(SmallModelConfig(**{**vars(tiny_settings), **settings}), tokenizer)


def test_half_precision_checkpoint_comes_as_float32(tiny_model, tokenizer, tmp_path):
    tiny_model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_policy(tmp_path)[0].dtype == torch.float32


def test_tokenizer_without_padding_pads_with_its_end_token(checkpoint, tokenizer, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "m")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_policy(path)[1].pad_token_id == tokenizer.eos_token_id


BLOCK = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def _write(path, text):
    path.write_text(text)


def _edit(path, name, change):
    settings = json.loads((path / name).read_text())
    change(settings)
    (path / name).write_text(json.dumps(settings))


def _headless(path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    config.tie_word_embeddings = False
    Qwen3Model(config).save_pretrained(path)


def _t5(path):
    T5ForConditionalGeneration(
        T5Config(vocab_size=17, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(path)


BAD = {
    "missing": (shutil.rmtree, "does not exist"),
    "no_config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "broken_config": (lambda p: _write(p / "config.json", "{"), "cannot be loaded"),
    "unknown_type": (lambda p: _edit(p, "config.json", lambda c: c.update(model_type="qwenn")), "cannot be loaded"),
    "encoder_decoder": (_t5, "T5Config.*cannot|cannot.*T5Config"),
    "encoder": (
        lambda p: BertForMaskedLM(BertConfig(**BLOCK)).save_pretrained(p),
        "BertLMHeadModel, whose tokens see what comes after",
    ),
    "headless": (_headless, "no weights for lm_head.weight"),
    "no_weights": (lambda p: (p / "model.safetensors").unlink(), "no file named model.safetensors"),
    "broken_weights": (lambda p: (p / "model.safetensors").write_bytes(b"hello"), "cannot be loaded"),
    "cut_weights": (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-100]),
        "cannot be loaded",
    ),
    "other_shapes": (lambda p: _edit(p, "config.json", lambda c: c.update(vocab_size=30)), "cannot be loaded"),
    "no_tokenizer": (lambda p: [f.unlink() for f in p.glob("tokenizer*")], "has no tokenizer"),
    "broken_tokenizer": (lambda p: _write(p / "tokenizer.json", "{"), "cannot be loaded"),
    "tokenizer_of_another_kind": (lambda p: _write(p / "tokenizer.json", "[]"), "cannot be loaded"),
    "size_as_text": (lambda p: _edit(p, "config.json", lambda c: c.update(hidden_size="big")), "cannot be loaded"),
    "no_heads": (lambda p: _edit(p, "config.json", lambda c: c.update(num_attention_heads=0)), "cannot be loaded"),
    "empty_pickle": (
        lambda p: [(p / "model.safetensors").unlink(), (p / "pytorch_model.bin").write_bytes(b"")],
        r"cannot be loaded .*\(EOFError\)",
    ),
    "no_end_token": (lambda p: _edit(p, "tokenizer_config.json", lambda c: c.pop("eos_token")), "no eos_token"),
    "own_code": (
        lambda p: _edit(
            p,
            "config.json",
            lambda c: c.update(model_type="mine", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}),
        ),
        "Python files of its own",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_directory_that_is_no_causal_language_model_gets_one_sentence(checkpoint, tmp_path, kind):
    path = shutil.copytree(checkpoint, tmp_path / "m")
    spoil, expected = BAD[kind]
    spoil(path)
    with pytest.raises(InputError, match=expected) as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    if kind not in ("no_end_token",):
        assert str(path) in str(caught.value)


def test_file_in_place_of_a_directory_gets_one_sentence(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.bin does not exist"):
        load_policy(tmp_path / "model.bin")


def test_the_policy_that_ships_is_loaded_by_its_name_and_is_right_now_and_then():
    model, _ = load_policy("demo")
    facts = json.loads((SHIPPED["demo"] / "warm_start.json").read_text())
    assert model.num_parameters() == facts["parameters"]
    assert WarmStartConfig().success_low <= facts["success"] <= WarmStartConfig().success_high
