"""What several folders need: a tiny model on disk, generators that say what they are told, trained tiny runs."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SmallModelConfig,
    TrainConfig,
)
from otb_analysis.rollouts.generation import Generation
from otb_analysis.rollouts.models import character_tokenizer, load_policy, small_model
from otb_analysis.tasks import TASKS, Prompt, Turn, make_task
from otb_analysis.training.loop import train
from otb_analysis.training.setup import Trainer

TINY = SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=24)
ALPHABET = "0123456789+=;#"


def sharpen(model, scale=0.3, seed=1):
    """Move every weight off its initial value, so that distributions differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def tiny_settings():
    return TINY


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture
def tiny_model(tokenizer):
    """A model of one layer and 2,000 weights whose logits differ from token to token."""
    return sharpen(small_model(TINY, tokenizer))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer):
    """A directory with that model and its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    sharpen(small_model(TINY, tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Scripted:
    """A generator that answers with texts given in advance, row by row, and keeps the contexts it was asked with."""

    def __init__(self, tokenizer, answers: Sequence[Sequence[str]], ends: Sequence[Sequence[bool]] | None = None):
        self.tokenizer = tokenizer
        self.answers = [list(row) for row in answers]
        self.ends = ends
        self.calls: list[list[list[int]]] = []

    def generate(self, contexts, max_new_tokens, temperature):
        self.calls.append([list(c) for c in contexts])
        turn = len(self.calls) - 1
        out = []
        for text in self.answers[turn]:
            finished = text.endswith("$")
            ids = self.tokenizer(text.rstrip("$"))["input_ids"] + [self.tokenizer.eos_token_id] * finished
            out.append(Generation(ids, [-0.5 - 0.01 * k for k in range(len(ids))], finished))
        assert len(out) == len(contexts)
        return out


@pytest.fixture
def scripted(tokenizer):
    """Make a generator: one list of answers per call, one text per context; "$" at the end is the end token."""
    return lambda *answers, tokenizer=tokenizer: Scripted(tokenizer, answers)


class Echo:
    """Two turns: the environment answers the first with "=" and the text again; pays 0.25 a turn that ends, and 1."""

    name = "echo"
    alphabet = ALPHABET

    def prompt(self, split, index):
        return Prompt(id=f"{split}{index}", text=f"{index}+", answer=str(index % 10))

    def demonstration(self, prompt):
        return [Turn("1", True, "=1"), Turn(f"#{prompt.answer}", True)]

    def reply(self, prompt, turns):
        return f"={turns[-1].text}" if len(turns) < 2 else None

    def reward(self, prompt, turns):
        paid = [{"form": 0.25 * turn.finished} for turn in turns]
        paid[-1]["correct"] = float(turns[-1].text == f"#{prompt.answer}")
        return paid


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def one_thread():
    """Bit-for-bit claims hold on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plain_logprobs():
    """The slow twin: log π of each sampled token by one forward pass per rollout, without padding."""

    @torch.no_grad()
    def logprobs(model, rollouts, temperature=1.0):
        out = np.full(rollouts.mask.shape, np.nan)
        for n, row in enumerate(rollouts.input_ids):
            length = int(rollouts.attention_mask[n].sum())
            logits = model(input_ids=torch.as_tensor(row[None, :length]), use_cache=False).logits[0].double()
            table = torch.log_softmax(logits / temperature, -1)
            for k in np.flatnonzero(rollouts.mask[n]):
                out[n, k] = float(table[k - 1, row[k]])
        return out

    return logprobs


class Half:
    """Pays 1 when the completion's first character is odd: an untrained model gets some of it."""

    name = "half"
    alphabet = "0123456789+=;#"

    def __init__(self, config):
        self.inner = make_task(replace(config, task="chain_sum"))

    def prompt(self, split, index):
        return self.inner.prompt(split, index)

    def demonstration(self, prompt):
        return self.inner.demonstration(prompt)

    def reply(self, prompt, turns):
        return None

    def reward(self, prompt, turns):
        return [{"odd": float(turns[-1].text[:1] in tuple("13579"))}]


@pytest.fixture(scope="session")
def half_task():
    """The catalogue with one more task, for as long as the tests run."""
    TASKS["half"] = Half
    yield
    del TASKS["half"]


@pytest.fixture(scope="session")
def tiny_config(checkpoint, half_task):
    """A run of a second: 3 steps, 4 prompts of 3 rollouts, every group measured at every step."""
    return TrainConfig(
        model=str(checkpoint),
        task="half",
        chain_sum=ChainSumConfig(terms_min=2, terms_max=3, largest=20),
        sample=SampleConfig(prompts=4, group_size=3, max_new_tokens=6),
        estimator=EstimatorConfig(name="otb"),
        optimize=OptimizeConfig(steps=3, learning_rate=1e-2, max_grad_norm=0.5),
        critic=CriticConfig(width=8, updates=2),
        measure=MeasureConfig(exact=Schedule(every=1, prompts=0)),
        evaluate=EvaluateConfig(every=2, prompts=8),
    )


@pytest.fixture(scope="session")
def trained(tiny_config, tmp_path_factory):
    """Train variants of the tiny run on one thread; the same variant is trained once."""
    root = tmp_path_factory.mktemp("runs")
    made = {}

    def run(name, **changes):
        if name not in made:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            made[name] = train(replace(tiny_config, run=name, root=root, **changes))
            torch.set_num_threads(before)
        return made[name]

    return run


@pytest.fixture(scope="session")
def otb_run(trained):
    return trained("otb")


@pytest.fixture
def made(tiny_config):
    """Make the state of a run with some fields of its configuration changed."""

    def make(**changes):
        config = replace(tiny_config, **changes)
        model, tokenizer = load_policy(config.model)
        return Trainer(config, model, tokenizer, make_task(config))

    return make


@pytest.fixture
def trainer(made):
    """The state of a run before its first step."""
    return made()


@pytest.fixture
def jsonl(tmp_path):
    """Write rows as a file of JSON lines and return its path."""

    def write(rows, name="rollouts.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def simple():
    """Rows with prompt, completion, reward and group: `prompts` groups of `size` rollouts."""

    def rows(prompts=4, size=3, **more):
        return [
            {"prompt": f"{g}+{g}=", "completion": f"{g}{k}#{'1' * k}", "reward": float(k % 2), "group": g, **more}
            for g in range(prompts)
            for k in range(size)
        ]

    return rows
