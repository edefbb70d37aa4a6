"""The critic: its targets by hand, both of its networks against slow twins, and what a run refuses."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from otb_analysis.arrays import returns_to_go
from otb_analysis.config import CriticConfig, EstimatorConfig, LoraConfig, SampleConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.measurement.table import compute_rewards, token_table
from otb_analysis.rollouts.models import character_tokenizer, load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.training.check import check
from otb_analysis.training.critic import BackboneNet, CriticBatch, critic_target, explained_variance, make_critic
from otb_analysis.training.setup import Trainer
from otb_analysis.types import EstimatorInputs

GAE = CriticConfig(target="gae", discount=0.9, decay=0.5)
TVM = CriticConfig(target="tvm")


@pytest.fixture
def rollouts(echo, scripted, tokenizer):
    """Prompts of one and of five characters, completions of one to nine tokens, one with a tool reply."""
    prompts = [echo.prompt("train", i) for i in (3, 1234)]
    answers = (["7$", "12", "$", "56789+="], ["#3$", "1"])
    return sample(scripted(*answers), tokenizer, echo, prompts, SampleConfig(group_size=2))


@pytest.fixture
def batch(tiny_model, rollouts):
    return CriticBatch(rollouts, forward_pass(tiny_model, rollouts, 1.0), [np.array([0, 1]), np.array([2, 3])])


@pytest.fixture
def critic(tiny_config, tiny_model, tokenizer):
    """Make a critic for the tiny model."""
    return lambda **own: make_critic(replace(tiny_config, critic=CriticConfig(**own)), tiny_model, tokenizer)


def a_batch(seed, gaps=True):
    """Six rollouts of three groups with rewards at many tokens, three ids, and tool tokens inside where asked for."""
    draw = np.random.default_rng(seed)
    mask = np.arange(7) < np.array([7, 5, 1, 0, 6, 4])[:, None]
    mask &= (draw.random((6, 7)) < 0.7) | (not gaps)
    return EstimatorInputs(
        reward=np.where(mask, draw.normal(size=(6, 7)), 0.0),  # one outside would be moved inside
        mask=mask,
        group=np.array([4, 4, 1, 1, 1, 2]),
        value=draw.normal(size=(6, 7)),
        token_id=draw.integers(0, 2, (6, 7)),
    )


def test_lambda_return_of_three_tokens():
    # V = .2, .4, .6, one reward of 1 at the end, γ = .9, λ = .5, backwards:
    # y_3 = 1, y_2 = .9(.5·.6 + .5·1) = .72, y_1 = .9(.5·.4 + .5·.72) = .504
    inputs = EstimatorInputs(np.array([[0, 0, 1.0]]), np.ones((1, 3), bool), np.zeros(1, int))
    inputs = replace(inputs, value=np.array([[0.2, 0.4, 0.6]]))
    np.testing.assert_allclose(critic_target(GAE, inputs), [[0.504, 0.72, 1.0]])


def test_shares_of_correct_rollouts_through_each_prefix():
    # y = ab, ac, de, de with R = 1, 0, 0, 0: before its first token every rollout is worth 1/4; a is worth 1/2 (one of
    # two), d 0. What ab → 1 and ac → 0 are worth stands after the last token, where no value is asked for.
    token = np.array([[0, 1], [0, 2], [3, 4], [3, 4]])
    reward = np.array([[0, 1.0], [0, 0], [0, 0], [0, 0]])
    inputs = EstimatorInputs(reward, np.ones((4, 2), bool), np.zeros(4, int), token_id=token)
    np.testing.assert_allclose(critic_target(TVM, inputs), [[0.25, 0.5], [0.25, 0.5], [0.25, 0], [0.25, 0]])


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_lambda_return_is_its_recursion_over_policy_tokens(seed, gaps):
    inputs = a_batch(seed, gaps)
    expected = np.zeros(inputs.mask.shape)
    for n in range(6):
        target = value = 0.0
        for t in np.flatnonzero(inputs.mask[n])[::-1]:
            target = inputs.reward[n, t] + 0.9 * (0.5 * value + 0.5 * target)
            expected[n, t], value = target, inputs.value[n, t]
    np.testing.assert_allclose(critic_target(GAE, inputs), expected, atol=1e-12)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_prefix_target_is_the_mean_over_those_who_start_alike(seed, gaps):
    inputs = a_batch(seed, gaps)
    total = np.where(inputs.mask, inputs.reward, 0).sum(axis=1)
    words = [inputs.token_id[n][inputs.mask[n]].tolist() for n in range(6)]
    expected = np.zeros(inputs.mask.shape)
    for n in range(6):
        for k, t in enumerate(np.flatnonzero(inputs.mask[n])):
            alike = [
                j for j in range(6) if inputs.group[j] == inputs.group[n] and words[j][:k] == words[n][:k] and words[j]
            ]
            expected[n, t] = total[alike].mean()
    np.testing.assert_allclose(critic_target(TVM, inputs), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_return_without_discount_or_decay_is_the_return_to_go(seed):
    inputs = a_batch(seed)
    found = critic_target(CriticConfig(target="gae", discount=1.0, decay=1.0), inputs)
    np.testing.assert_allclose(found, returns_to_go(inputs.reward, inputs.mask), atol=1e-12)
    np.testing.assert_array_equal(critic_target(CriticConfig(), inputs), returns_to_go(inputs.reward, inputs.mask))


@pytest.mark.parametrize("config", [CriticConfig(), GAE, TVM], ids=lambda c: c.target)
def test_what_lies_outside_the_mask_is_never_read(config):
    inputs = a_batch(0)
    dirty = replace(
        inputs,
        reward=np.where(inputs.mask, inputs.reward, np.nan),
        value=np.where(inputs.mask, inputs.value, np.nan),
        token_id=np.where(inputs.mask, inputs.token_id, -7),
    )
    np.testing.assert_array_equal(critic_target(config, dirty), critic_target(config, inputs))


def with_values(echo, rollouts, batch, value):
    table = token_table(compute_rewards(echo, rollouts), batch.forward, value)
    return replace(table, value=value)


def test_explained_variance_is_one_for_the_returns_and_zero_for_a_constant(echo, rollouts, batch):
    table = with_values(echo, rollouts, batch, np.zeros(batch.forward.mask.shape))
    to_go = returns_to_go(table.reward, table.mask)
    # Half of every return leaves half of its deviation, a quarter of its variance; a shift costs nothing.
    for value, share in ((to_go, 1.0), (np.full(to_go.shape, 3.0), 0.0), (0.5 * to_go + 1, 0.75), (-to_go, -3.0)):
        assert explained_variance(replace(table, value=value)) == pytest.approx(share, abs=1e-12)


def test_explained_variance_of_nothing_is_undefined(echo, rollouts, batch):
    table = with_values(echo, rollouts, batch, np.zeros(batch.forward.mask.shape))
    nothing = (
        replace(table, value=None),
        replace(table, mask=np.zeros_like(table.mask)),
        replace(table, reward=np.zeros(table.mask.shape)),
        replace(table, value=np.full(table.mask.shape, np.nan)),
    )
    assert [explained_variance(empty) for empty in nothing] == [None] * 4


@pytest.mark.parametrize("kind", ["head", "model"])
def test_critic_learns_a_constant_and_a_line_along_each_rollout(kind, critic, batch):
    mask = batch.forward.mask.numpy()
    line = np.cumsum(mask, axis=1) / 5.0
    for target in (np.full(mask.shape, 0.7), line):
        judge = critic(kind=kind, learning_rate=0.02, width=32, updates=80)
        before = judge.value(batch)
        loss = judge.update(batch, np.where(mask, target, np.nan))
        assert loss == pytest.approx(np.square(before - target)[mask].mean(), rel=1e-4)
        after = judge.value(batch)
        np.testing.assert_allclose(after[mask], target[mask], atol=0.05)
        assert (after[~mask] == 0).all()


def test_value_of_a_backbone_is_its_linear_function_of_the_state_before_each_token(critic, batch, rollouts, tiny_model):
    judge = critic(kind="model")
    with torch.no_grad():
        judge.net.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        judge.net.head.bias.fill_(0.25)
    found, mask, columns = judge.value(batch), batch.forward.mask.numpy(), rollouts.completion_columns()
    for n in range(4):
        length = int(rollouts.attention_mask[n].sum())
        ids = torch.as_tensor(rollouts.input_ids[n, :length])[None]
        with torch.no_grad():
            state = tiny_model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            expected = state.double() @ judge.net.head.weight[0].double() + 0.25
        for t in np.flatnonzero(mask[n]):
            assert found[n, t] == pytest.approx(float(expected[columns[n, t] - 1]), rel=1e-4, abs=1e-5)


def test_cut_into_parts_and_recomputed_the_updates_are_the_same(critic, batch):
    mask = batch.forward.mask.numpy()
    target = np.where(mask, np.cumsum(mask, axis=1), np.nan)
    values = []
    for parts, recompute in ((batch.parts, False), ([np.arange(4)], False), ([np.array([n]) for n in range(4)], True)):
        judge = critic(kind="model", learning_rate=0.01, updates=3, gradient_checkpointing=recompute)
        own = replace(batch, parts=parts)
        judge.update(own, target)
        values.append(judge.value(own))
    assert np.abs(values[0]).max() > 0.01
    for other in values[1:]:
        np.testing.assert_allclose(other, values[0], rtol=1e-3, atol=1e-5)


GPT2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
OPT = OPTConfig(
    vocab_size=20,
    hidden_size=16,
    ffn_dim=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    word_embed_proj_dim=16,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("make", [lambda: GPT2LMHeadModel(GPT2), lambda: OPTForCausalLM(OPT)], ids=["gpt2", "opt"])
def test_dropout_is_off_while_a_backbone_is_recomputed(make, batch):
    model = make()
    net = BackboneNet(model, bfloat16=False, checkpointing=True)
    torch.nn.init.ones_(net.head.weight)
    before = torch.get_rng_state()
    first, second = (net(batch, np.arange(4)) for _ in range(2))
    assert net.backbone.training
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    own = model.base_model.drop.p if isinstance(model, GPT2LMHeadModel) else model.base_model.decoder.layers[0].dropout
    assert own == 0.1  # the policy keeps its own


def test_bfloat16_products_give_nearly_the_same_values_in_float32(batch, tiny_model):
    values = []
    for narrow in (False, True):
        net = BackboneNet(tiny_model, bfloat16=narrow, checkpointing=False)
        torch.nn.init.constant_(net.head.weight, 0.1)
        values.append(net(batch, np.arange(4)).detach())
    assert values[1].dtype == torch.float32
    assert 0 < float((values[1] - values[0]).abs().max()) < 0.05


@pytest.mark.parametrize("kind", ["head", "model"])
def test_update_leaves_the_policy_and_its_gradients_alone(kind, critic, batch, tiny_model):
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    critic(kind=kind, learning_rate=0.1).update(batch, np.ones(batch.forward.mask.shape))
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in tiny_model.named_parameters())


@pytest.mark.parametrize("kind", ["head", "model"])
def test_loss_that_is_not_finite_moves_nothing(kind, critic, batch):
    judge = critic(kind=kind)
    before = judge.value(batch)
    assert judge.update(batch, np.full(before.shape, 1e30)) == np.inf
    np.testing.assert_array_equal(judge.value(batch), before)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_state_brings_back_values_and_the_updates_that_follow(kind, critic, batch, one_thread):
    target = np.ones(batch.forward.mask.shape)
    first, second = critic(kind=kind, learning_rate=0.01), critic(kind=kind, learning_rate=0.01)
    first.update(batch, target)
    second.load_state(deepcopy(first.state()))  # as through a file: nothing is shared
    for judge in (first, second):
        judge.update(batch, -target)
    np.testing.assert_array_equal(first.value(batch), second.value(batch))


def test_backbone_starts_from_the_policy_without_its_adapters_or_from_another_directory(
    tiny_config, tokenizer, tiny_model, tmp_path, echo
):
    model, _ = load_policy(tiny_config.model)
    start = {name: p.detach().clone() for name, p in model.base_model.named_parameters()}
    own = replace(tiny_config, lora=LoraConfig(rank=2), critic=CriticConfig(kind="model"))
    net = Trainer(own, model, tokenizer, echo).critic.net
    found = dict(net.backbone.named_parameters())
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], start[name]) and found[name].requires_grad for name in start)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(3.0)
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    elsewhere = replace(tiny_config, critic=CriticConfig(kind="model", path=str(tmp_path)))
    net = make_critic(elsewhere, model, tokenizer).net
    assert (net.backbone.norm.weight == 3).all()


def test_directory_with_other_tokens_is_refused(tiny_config, tiny_model):
    own = replace(tiny_config, critic=CriticConfig(kind="model", path=tiny_config.model))
    with pytest.raises(InputError, match=r"critic\.path .* other tokens than the policy's") as got:
        make_critic(own, tiny_model, character_tokenizer("abc"))
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("estimator", "options", "critic", "named"),
    [
        ("tvm", {}, {}, "critic.target is 'return'; set critic.target to 'tvm'"),
        ("value", {"discount": "0.9"}, {}, "discount is 0.9 but the critic is fitted with 1.0"),
        ("value", {"decay": "0.9"}, {"target": "tvm"}, "decay is 0.9 but the critic is fitted with 1.0"),
        ("value", {}, {"target": "gae"}, "decay is 1.0 but the critic is fitted with 0.95"),
        ("value", {"decay": "0.95"}, {"target": "gae", "discount": 0.5}, "discount is 1.0 but the critic is"),
        ("otb", {}, {"discount": 1.5}, "critic.discount is 1.5; choose a number from 0 to 1"),
        ("otb", {}, {"decay": float("nan")}, "critic.decay is nan"),
        ("otb", {}, {"path": "there"}, "critic.path is 'there', which a head does not have"),
        ("otb", {}, {"gradient_checkpointing": True}, "critic.gradient_checkpointing is True, which a head"),
        ("otb", {}, {"learning_rate": -1.0}, "critic.learning_rate is -1.0"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(tiny_config, tmp_path, estimator, options, critic, named):
    own = EstimatorConfig(name=estimator, options=options)
    with pytest.raises(InputError) as caught:
        check(replace(tiny_config, root=tmp_path, estimator=own, critic=CriticConfig(**critic)))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("estimator", "options", "critic"),
    [
        ("value", {}, {}),
        ("value", {"decay": "0.95"}, {}),  # the returns' values serve any λ
        ("value", {"decay": "0.95"}, {"target": "gae"}),
        ("value", {}, {"target": "tvm"}),
        ("tvm", {}, {"target": "tvm"}),
        ("otb", {}, {"target": "gae", "discount": 0.5}),
    ],
)
def test_what_fits_is_allowed(tiny_config, tmp_path, estimator, options, critic):
    own = EstimatorConfig(name=estimator, options=options)
    check(replace(tiny_config, root=tmp_path, estimator=own, critic=CriticConfig(**critic)))
