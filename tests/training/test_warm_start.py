"""The warm start: stops inside its band, is made once, and says why it could not."""

from dataclasses import replace

import pytest
import torch

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.errors import InputError, StoreError
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import character_tokenizer, load_policy, small_model
from otb_analysis.tasks import make_task
from otb_analysis.training import warm_start
from otb_analysis.training.warm_start import fit, success_rate, warm_started

EASY = TrainConfig(
    chain_sum=ChainSumConfig(terms_min=2, terms_max=2, largest=10),
    small_model=SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=48),
    sample=SampleConfig(max_new_tokens=12),
    warm_start=WarmStartConfig(success_low=0.1, success_high=0.95, batch=32, check_every=10, check_prompts=32),
)


@pytest.fixture
def scene():
    task = make_task(EASY)
    tokenizer = character_tokenizer(task.alphabet)
    return small_model(EASY.small_model, tokenizer), tokenizer, task


def scripted_success(monkeypatch, values):
    """Let the measurements of success come out as given; keep the weights at each."""
    seen, left = [], list(values)

    def measured(generator, *args):
        seen.append({name: tensor.clone() for name, tensor in generator.model.state_dict().items()})
        return left.pop(0)

    monkeypatch.setattr(warm_start, "success_rate", measured)
    monkeypatch.setattr(warm_start, "LEARNED_ENOUGH_TO_CHECK", float("inf"))
    return seen


def test_overshoot_goes_back_to_the_check_before_and_on_in_smaller_steps(scene, monkeypatch):
    # Checks at steps 10 (below), 20 (above: back to the weights of step 10) and, every 2 now, at 22 (inside).
    seen = scripted_success(monkeypatch, [0.0, 1.0, 0.5])
    restored = []
    load = scene[0].load_state_dict
    monkeypatch.setattr(scene[0], "load_state_dict", lambda state: (restored.append(state), load(state))[1])
    assert fit(*scene, EASY) == (22, 0.5)
    assert all(torch.equal(restored[0][name], seen[0][name]) for name in seen[0])
    assert not all(torch.equal(restored[0][name], seen[1][name]) for name in seen[0])


def test_budget_that_runs_out_is_one_sentence(scene, monkeypatch):
    scripted_success(monkeypatch, [0.02] * 9)
    short = replace(EASY, warm_start=replace(EASY.warm_start, max_steps=20))
    with pytest.raises(InputError, match=r"reached 2% success after 20 steps; 10%"):
        fit(*scene, short)


def test_made_model_is_kept_and_not_made_again(tmp_path, monkeypatch):
    scripted_success(monkeypatch, [0.5])
    path = warm_started(EASY, cache=tmp_path)
    assert load_policy(path)[0].config.hidden_size == 32
    monkeypatch.setattr(warm_start, "fit", None)
    assert warm_started(EASY, cache=tmp_path) == path
    # What the warm start does not read does not ask for another one; what it reads does.
    assert warm_started(replace(EASY, run="x", estimator=replace(EASY.estimator, name="rloo")), cache=tmp_path) == path
    with pytest.raises(TypeError):
        warm_started(replace(EASY, seed=1), cache=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_half_made_cache_is_made_again(tmp_path, monkeypatch):
    scripted_success(monkeypatch, [0.5, 0.5])
    path = warm_started(EASY, cache=tmp_path)
    (path / "warm_start.json").unlink()
    assert warm_started(EASY, cache=tmp_path) == path
    assert (path / "warm_start.json").is_file()


def test_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    scripted_success(monkeypatch, [0.5])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot keep the warm-started model in .*file"):
        warm_started(EASY, cache=tmp_path / "file")


def test_success_is_the_mean_reward_of_sampled_answers(scene, monkeypatch):
    model, tokenizer, task = scene
    monkeypatch.setattr(type(task), "reward", lambda self, prompt, turns: [{"correct": float(len(prompt.text) % 2)}])
    prompts = [task.prompt("heldout", i) for i in range(20)]
    expected = sum(len(prompt.text) % 2 for prompt in prompts) / 20
    assert success_rate(
        TransformersGenerator(model, tokenizer), tokenizer, task, prompts, EASY.sample
    ) == pytest.approx(expected)


@pytest.mark.slow
def test_easy_task_is_learned_into_the_band(tmp_path):
    path = warm_started(EASY, cache=tmp_path)
    model, tokenizer = load_policy(path)
    torch.manual_seed(1)
    # 400 answers to other prompts: within four standard errors of the band.
    task = make_task(EASY)
    prompts = [task.prompt("heldout", i) for i in range(400)]
    assert (
        success_rate(TransformersGenerator(model, tokenizer), tokenizer, task, prompts, EASY.sample) > 0.1 - 4 * 0.015
    )
