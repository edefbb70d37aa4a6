"""The trainer for verl with stubs for its workers and its queue; verl's own two methods run as they are."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its optional engines are not here, and it says so
    pytest.importorskip("verl", reason="verl is not here; `make test-verl` makes an environment that has it")
    import_module("verl.trainer.ppo.v1")

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls, trainer_base

from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.integrations.verl_trainer import FLAG, OTBTrainerSync
from otb_analysis.types import EstimatorInputs

PROMPT, RESPONSE, V = (3, 2, 4, 3), (5, 2, 4, 3), 6
KEYS = ["p_0_0", "p_1_0", "q_0_0", "q_1_0"]
CONFIG = {
    "algorithm": {
        "adv_estimator": "otb_analysis/otb_loo",
        "gamma": 1.0,
        "lam": 1.0,
        "use_kl_in_reward": False,
        "otb_analysis": {"tail": "group"},
    },
    "actor_rollout_ref": {
        "model": {"use_fused_kernels": False},
        "rollout": {"temperature": 1.0, "n": 2, "calculate_log_probs": False},
        "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
    },
    "trainer": {"v1": {"trainer_mode": "otb_sync"}},
}


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Queue:
    """What of TransferQueue the two methods use: fields by key, those that are missing left out."""

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert keys == KEYS and partition_id == "train"
        there = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(there, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.fields |= dict(fields.items())
        return SimpleBatch()


class SimpleBatch(SimpleNamespace):
    """A batch's meta data."""

    def __init__(self) -> None:
        super().__init__(keys=KEYS, partition_id="train", extra_info={})

    def __len__(self) -> int:
        return len(self.keys)


class Actor:
    """A worker group: log-probabilities and, where the flag asks, Σπ², each at the token before, as verl's engines."""

    def __init__(self, queue: Queue, logprobs: list[torch.Tensor], chosen: list[torch.Tensor]) -> None:
        self.queue, self.logprobs, self.chosen, self.asked = queue, logprobs, chosen, []

    def compute_log_prob(self, batch: SimpleBatch) -> SimpleBatch:
        self.asked.append(bool(batch.extra_info.get(FLAG)))
        rows = zip(self.logprobs, self.chosen, strict=True)
        out = {
            "log_probs": nested([lp.gather(-1, y[:, None])[:, 0] for lp, y in rows]),
            "entropy": nested([-(lp.exp() * lp).sum(-1) for lp in self.logprobs]),
        }
        if self.asked[-1]:
            out["sum_pi_squared"] = nested([(2 * lp).exp().sum(-1) for lp in self.logprobs])
        return self.queue.kv_batch_put(KEYS, "train", out)


@pytest.fixture
def world(monkeypatch):
    """A trainer of each kind on the same queue, and the logits that its actor has."""
    rng = np.random.default_rng(3)
    lengths = [a + b for a, b in zip(PROMPT, RESPONSE, strict=True)]
    logprobs = [torch.tensor(rng.normal(size=(n, V))).log_softmax(-1) for n in lengths]
    chosen = [torch.tensor(rng.integers(V, size=n)) for n in lengths]
    queue = Queue()
    scores = [torch.zeros(n, dtype=torch.float64) for n in RESPONSE]
    for row, score in zip(scores, (1.0, 0.0, 2.0, -1.0), strict=True):
        row[-1] = score
    queue.fields = {
        "uid": np.array(["p", "p", "q", "q"]).tolist(),
        "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in RESPONSE]),
        "rm_scores": nested(scores),
    }
    monkeypatch.setattr(trainer_base, "tq", queue)

    def make(cls: type, **algorithm: object):
        trainer = object.__new__(cls)
        trainer.config = OmegaConf.create(CONFIG)
        trainer.config.algorithm.update(algorithm)
        trainer.actor_rollout_wg = Actor(queue, logprobs, chosen)
        return trainer

    return SimpleNamespace(queue=queue, make=make, logprobs=logprobs, chosen=chosen, scores=scores)


def expected(world: SimpleNamespace, name: str, tail: str) -> np.ndarray:
    """By `estimate`, from the logits at the token before each response token."""
    from otb_analysis.estimators import options_from_dict

    width = max(RESPONSE)
    energy, reward, mask = np.zeros((4, width)), np.zeros((4, width)), np.zeros((4, width), bool)
    for i, n in enumerate(RESPONSE):
        before = slice(PROMPT[i] - 1, PROMPT[i] + n - 1)
        pi, y = world.logprobs[i][before].exp().numpy(), world.chosen[i][before].numpy()
        energy[i, :n] = ((np.eye(V)[y] - pi) ** 2).sum(-1)
        reward[i, :n], mask[i, :n] = world.scores[i].numpy(), True
    inputs = EstimatorInputs(reward, mask, np.array([0, 0, 1, 1]), energy=energy)
    return estimate(name, inputs, options_from_dict(name, {"tail": tail})).advantage


def step(trainer, metrics: dict | None = None):
    batch = trainer._compute_old_log_prob(SimpleBatch(), {} if metrics is None else metrics)
    return trainer._compute_advantage(batch, {})


def test_v1_gets_our_estimator_with_the_energies_of_its_actor(world):
    trainer = world.make(OTBTrainerSync)
    step(trainer)
    assert trainer.actor_rollout_wg.asked == [True]
    advantages = world.queue.fields["advantages"].to_padded_tensor(0.0).numpy()
    np.testing.assert_allclose(advantages, expected(world, "otb_loo", "group"), atol=1e-12)


def test_later_passes_of_the_actor_are_not_asked_again(world):
    trainer = world.make(OTBTrainerSync)
    batch = trainer._compute_old_log_prob(SimpleBatch(), {})
    before = world.queue.fields["sum_pi_squared"]
    trainer.ref_in_actor = True
    trainer._compute_ref_log_prob(batch, {})
    assert trainer.actor_rollout_wg.asked == [True, False]
    assert world.queue.fields["sum_pi_squared"] is before


def test_verls_own_otb_stops_on_its_own_default_path(world):
    trainer = world.make(PPOTrainerSync, adv_estimator="optimal_token_baseline")
    with pytest.raises(AssertionError, match="requires sum_pi_squared"):
        step(trainer)


def test_ours_without_our_trainer_says_what_to_set(world):
    with pytest.raises(InputError, match=r"trainer\.v1\.trainer_mode=otb_sync"):
        step(world.make(PPOTrainerSync))


def test_an_engine_without_sum_pi_squared_is_named(world):
    trainer = world.make(OTBTrainerSync)
    batch = trainer._compute_old_log_prob(SimpleBatch(), {})
    del world.queue.fields["sum_pi_squared"]
    with pytest.raises(InputError, match="the actor returned no sum_pi_squared"):
        trainer._compute_advantage(batch, {})


def test_it_is_registered_and_is_sync_to_verl(monkeypatch):
    seen = []
    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda self, config: seen.append(config.trainer.v1.trainer_mode))
    get_trainer_cls("otb_sync")(OmegaConf.create(CONFIG))
    assert get_trainer_cls("otb_sync") is OTBTrainerSync and seen == ["sync"]


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        ("actor_rollout_ref.model.use_fused_kernels", True, "use_fused_kernels is true"),
        ("algorithm.rollout_correction", {"bypass_mode": True}, "bypass_mode is true"),
    ],
)
def test_settings_without_sum_pi_squared_are_refused(where, value, sentence):
    config = OmegaConf.create(CONFIG)
    OmegaConf.update(config, where, value)
    with pytest.raises(InputError, match=sentence):
        OTBTrainerSync(config)
