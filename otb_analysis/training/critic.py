"""A small value network on the policy's hidden states, trained beside the policy and never through it."""

import torch
from torch import Tensor, nn

from otb_analysis.config import CriticConfig


class Critic(nn.Module):
    """V(h_t): a two-layer network on the detached final hidden state that predicts y_t; h_t precedes y_t.

    It is fitted by least squares to the return-to-go G_t of the policy's tokens. A value that a step records comes from
    the critic as it was before that step's update, so on-policy it has not seen the rollout it judges.
    """

    def __init__(self, hidden_size: int, config: CriticConfig, seed: int = 0):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.LayerNorm(hidden_size), nn.Linear(hidden_size, config.width), nn.SiLU(), nn.Linear(config.width, 1)
            )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.learning_rate)

    @torch.no_grad()
    def value(self, hidden: Tensor) -> Tensor:
        """Return V(h_t) [N, T] of hidden states [N, T, d]."""
        return self.net(hidden.float())[..., 0]

    def update(self, hidden: Tensor, return_to_go: Tensor, mask: Tensor) -> float:
        """Take the configured number of least-squares steps on one batch.

        Args:
            hidden: Detached hidden states [N, T, d].
            return_to_go: G_t [N, T].
            mask: True at policy tokens [N, T].

        Returns:
            Mean squared error before the first step; NaN when the batch has no policy token.
        """
        inputs, targets = hidden[mask].float(), return_to_go[mask].float()
        first = float("nan")
        if not len(targets):
            return first
        for i in range(self.config.updates):
            loss = (self.net(inputs)[:, 0] - targets).square().mean()
            first = float(loss.detach()) if i == 0 else first
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return first

    def state(self) -> dict[str, object]:
        """Return weights and optimizer, for a checkpoint."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, dict]) -> None:
        """Go back to a state that `state` returned."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
