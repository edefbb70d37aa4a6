"""Ours against verl's own functions, called as verl calls them; `make test-verl` runs this where verl is."""

import warnings
from importlib import import_module

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its optional engines are not here, and it says so
    pytest.importorskip("verl", reason="verl is not here; `make test-verl` makes an environment that has it")
    import_module("verl.trainer.ppo.ray_trainer")

from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from otb_analysis.arrays import at_policy_tokens
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.integrations.verl import REGISTERED, delivered_energy, proxy_energy, turns
from otb_analysis.types import EstimatorInputs

N, T, V = 14, 9, 7
LENGTHS = (9, 4, 7, 7, 3, 5, 9, 1, 6, 2, 8, 8, 5, 4)
FLOAT32 = 1e-6
"""Numbers of about 1 where verl rounds a step to float32, whatever it is given."""
UID = np.array(["b", "a", "b", "c", "a", "b", "a", "c", "c", "b", "a", "a", "b", "c"], dtype=object)


def batch(gaps: bool = False) -> DataProto:
    """Terminal rewards, ragged groups of 4–5, two of 14 rewards 0; log-probs and Σπ² of random logits, float64."""
    rng = np.random.default_rng(5)
    length = np.array(LENGTHS)
    mask = np.arange(T) < length[:, None]
    if gaps:
        mask[:, 2] &= length < 4  # a tool token in every rollout of at least 4
    reward = np.zeros((N, T))
    reward[np.arange(N), length - 1] = np.round(rng.normal(size=N), 2) * (np.arange(N) % 7 > 0)
    logits = torch.tensor(rng.normal(size=(N, T, V)))
    logprobs = logits.log_softmax(-1)
    sampled = torch.tensor(rng.integers(V, size=(N, T)))
    tensors = {
        "token_level_rewards": torch.tensor(reward),
        "response_mask": torch.tensor(mask).to(torch.int64),
        "old_log_probs": logprobs.gather(-1, sampled[..., None])[..., 0],
        "sum_pi_squared": (2 * logprobs).exp().sum(-1),
    }
    return DataProto.from_dict(tensors, non_tensors={"uid": UID})


def energies(data: DataProto) -> np.ndarray:
    return proxy_energy(data.batch["old_log_probs"].numpy(), data.batch["sum_pi_squared"].numpy())


def ours(name: str, data: DataProto, config: dict | None = None) -> torch.Tensor:
    """Through verl's own dispatch, with energies where the name wants them."""
    with delivered_energy(energies(data)):
        return compute_advantage(data, f"otb_analysis/{name}", config=config).batch["advantages"]


def theirs(name: str, data: DataProto, **more: torch.Tensor) -> torch.Tensor:
    function = core_algos.get_adv_estimator_fn(name)
    inside = {key: data.batch[key].clone() for key in ("token_level_rewards", "response_mask")}
    return function(**inside, index=UID, config=None, **more)[0]


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("name", "peer"), [("grpo", "grpo"), ("rloo", "rloo"), ("rloo", "rloo_vectorized"), ("opo", "opo")]
)
def test_advantages_equal_those_of_verl(name, peer):
    data = batch()
    close(ours(name, data), theirs(peer, data))


def test_grpo_equals_verls_vectorized_one_which_counts_in_float32():
    data = batch()
    close(ours("grpo", data), theirs("grpo_vectorized", data), atol=FLOAT32)


@pytest.mark.parametrize(
    ("name", "peer"),
    [("rloo", "rloo"), ("opo", "opo"), ("otb", "optimal_token_baseline")],
)
def test_a_rollout_alone_keeps_its_reward(name, peer):
    data = batch()[1:2]
    fields = {key: data.batch[key] for key in ("old_log_probs", "sum_pi_squared")} if name == "otb" else {}
    function = core_algos.get_adv_estimator_fn(peer)
    out = function(data.batch["token_level_rewards"].clone(), data.batch["response_mask"], UID[1:2], **fields)[0]
    close(ours(name, data), out)


@pytest.mark.parametrize(("peer", "kept"), [("grpo", True), ("grpo_vectorized", True), ("rloo_vectorized", False)])
def test_of_a_rollout_alone_verl_does_not_always_what_we_do(peer, kept):
    data = batch()[1:2]
    function = core_algos.get_adv_estimator_fn(peer)
    given = data.batch["token_level_rewards"].clone(), data.batch["response_mask"], UID[1:2]
    assert bool(function(*given)[0].any()) == kept
    assert not ours("grpo", data).any() and ours("rloo", data).any()


def test_rloo_equals_verls_with_tool_tokens_in_the_middle():
    data = batch(gaps=True)
    close(ours("rloo", data), theirs("rloo", data))


def test_group_mean_is_grpo_without_the_division():
    data = batch()
    rewards = data.batch["token_level_rewards"].clone()
    plain = core_algos.compute_grpo_outcome_advantage(rewards, data.batch["response_mask"], UID, 1e-6, False)[0]
    close(ours("group_mean", data), plain)


def test_reinforce_plus_plus_baseline_is_our_group_mean_whitened_over_tokens():
    data = batch()
    a, m = ours("group_mean", data), data.batch["response_mask"].bool()
    whitened = torch.where(m, (a - a[m].mean()) / (a[m].var() + 1e-8).sqrt(), 0.0)
    close(whitened, theirs("reinforce_plus_plus_baseline", data), atol=FLOAT32)  # its n/(n − 1) is float32


def test_gpg_is_our_group_mean_times_rollouts_over_those_with_a_reward():
    data = batch()
    close(ours("group_mean", data) * N / (N - 2), theirs("gpg", data), atol=FLOAT32)  # its ratio is float32


def test_remax_is_ours_without_a_baseline_minus_the_greedy_reward():
    data, greedy = batch(), torch.linspace(-1.0, 1.0, N, dtype=torch.float64)
    expected = ours("none", data) - greedy[:, None] * data.batch["response_mask"]
    close(expected, theirs("remax", data, reward_baselines=greedy))


@pytest.mark.parametrize(
    ("name", "peer", "gaps"),
    [
        ("otb", "optimal_token_baseline", False),
        ("otb_turn", "tir_optimal_token_baseline", False),
        ("otb_turn", "tir_optimal_token_baseline", True),
    ],
)
def test_otb_equals_verls_called_with_sum_pi_squared(name, peer, gaps):
    data = batch(gaps)
    fields = {key: data.batch[key] for key in ("old_log_probs", "sum_pi_squared")}
    close(ours(name, data), theirs(peer, data, epsilon=1e-300, **fields), atol=1e-12)
    # with verl's own ε = 1e-8 in the denominator, against weights of about 1
    close(ours(name, data), theirs(peer, data, **fields), atol=1e-6)


@pytest.mark.parametrize("name", REGISTERED)
def test_each_registered_name_gives_what_estimate_gives(name):
    data = batch()
    mask = data.batch["response_mask"].numpy().astype(bool)
    reward, group = data.batch["token_level_rewards"].numpy(), np.unique(UID.astype(str), return_inverse=True)[1]
    inputs = EstimatorInputs(reward, mask, group, energy=energies(data), turn=np.zeros_like(mask, dtype=int))
    np.testing.assert_array_equal(ours(name, data).numpy(), estimate(name, inputs).advantage)


def test_dtype_and_device_are_those_of_the_rewards_and_returns_are_to_go():
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_rewards"].float()
    with delivered_energy(energies(data)):
        out = compute_advantage(data, "otb_analysis/rloo").batch
    assert out["advantages"].dtype == out["returns"].dtype == torch.float32
    totals = data.batch["token_level_rewards"].sum(1, keepdim=True) * data.batch["response_mask"]
    close(out["returns"], totals)


def test_options_come_from_the_algorithm_section():
    from omegaconf import OmegaConf

    data = batch()
    config = OmegaConf.create({"gamma": 1.0, "otb_analysis": {"tail": "zero"}})
    assert not torch.equal(ours("otb", data, config), ours("otb", data))
    with pytest.raises(InputError, match="option 'tial'"):
        ours("otb", data, OmegaConf.create({"otb_analysis": {"tial": "zero"}}))


def test_energy_is_asked_for_in_a_sentence_where_the_trainer_delivers_none():
    with pytest.raises(InputError, match=r"otb_loo weighs tokens .*trainer_mode=otb_sync"):
        compute_advantage(batch(), "otb_analysis/otb_loo")


def test_rollouts_without_a_prompt_are_refused():
    data = batch()
    data.non_tensor_batch.pop("uid")
    with pytest.raises(InputError, match="got no index"):
        compute_advantage(data, "otb_analysis/rloo")


def test_synthetic_padding_rows_change_nothing():
    data = batch()
    whole = ours("batch_mean_loo", data)
    padded = DataProto.concat([data.select(list(batch().batch.keys())), batch()[1:2]])
    padded.batch["response_mask"][-1] = 0
    padded.non_tensor_batch["uid"][-1] = "pad0123456789abcdef"
    out = ours("batch_mean_loo", padded)
    close(out[:-1], whole)
    assert not out[-1].any()


def test_rewards_at_tool_tokens_move_to_the_policy_token_before():
    mask = np.array([[0, 1, 0, 1, 0, 0]], bool)
    reward = np.array([[0.5, 1.0, 2.0, 4.0, 8.0, 16.0]])
    np.testing.assert_array_equal(at_policy_tokens(reward, mask), [[0, 3.5, 0, 28.0, 0, 0]])
    np.testing.assert_array_equal(turns(mask), [[0, 0, 0, 1, 1, 1]])


def test_proxy_energy_is_verls_formula_and_never_negative():
    data = batch()
    direct = 1 - 2 * data.batch["old_log_probs"].exp() + data.batch["sum_pi_squared"]
    np.testing.assert_allclose(energies(data), direct.numpy(), atol=1e-14)
    # π_y = 1 − 1e-9, Σπ² = (1 − 1e-9)² + ~0: ‖e_y − π‖² ≈ 1e-18; in float32 verl's form gives 0 or noise of 6e-8
    logprob = np.log1p(-1e-9)
    np.testing.assert_allclose(proxy_energy(logprob, np.exp(2 * logprob)), 1e-18, rtol=1e-6)
