"""Soft tokens: vectors h̃ = pE + σ·N(0, I) that a policy draws in place of tokens, and their exact log-density.

p = softmax(z/τ) are the probabilities of the next token and E the model's table of input embeddings. The vector is
what the model reads next. It is an action like a token: given, when scores are taken. So the score of a soft token is
∇ log q(h̃) = (∂pE/∂θ)ᵀ(h̃ − pE)/σ², through p and through the table E itself. No token was drawn, so the categorical
proxy ‖e_y − π‖² does not exist there.

Source: arXiv 2509.19170. Ours: σ is fixed when the vector is drawn; the score has no part for how it was chosen.

In a batch a soft token has an id of its own, from the size of the table on. So no two texts with different vectors
look alike, and what shares prefixes shares none of these.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.scope import end_of


@dataclass(frozen=True)
class SoftTokens:
    """The soft tokens of a batch; made by sampling, read by every pass that scores them."""

    vectors: Tensor  # h̃ [S, d]
    sigma: float  # σ, the standard deviation of each entry
    first: int  # Id of the first of them: the size of the table of embeddings
    likeliest: Tensor  # The token with the largest probability where each was drawn [S]; for showing only

    def among(self, ids: Tensor) -> Tensor:
        """Return True where an id is that of a soft token."""
        return ids >= self.first

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors of some ids [..., d]; of other tokens, any."""
        return self.vectors.to(ids.device)[(ids - self.first).clamp(min=0)]

    def joined(self, other: "SoftTokens") -> "SoftTokens":
        """Return both, the other's ids raised by the number of these.

        Raises:
            InputError: They were drawn with another noise.
        """
        if not math.isclose(self.sigma, other.sigma, rel_tol=1e-6):
            raise InputError(
                f"soft tokens were drawn with σ = {self.sigma:g} and {other.sigma:g}; score the batches one by one."
            )
        vectors = torch.cat([self.vectors, other.vectors])
        return replace(self, vectors=vectors, likeliest=torch.cat([self.likeliest, other.likeliest]))


def embeddings_of(model: nn.Module) -> nn.Embedding:
    """Return a model's table of input embeddings, which soft tokens are mixtures of.

    Raises:
        InputError: It has none, or one that does more than look up rows.
    """
    table = end_of(model, "input")
    if not isinstance(table, nn.Embedding) or type(table).forward is not nn.Embedding.forward:
        raise InputError(
            f"soft tokens need a plain table of input embeddings but {type(model).__name__} has "
            f"{type(table).__name__}; sample discrete tokens from it (sample.soft 0)."
        )
    return table


def mixtures(z: Tensor, table: Tensor) -> Tensor:
    """Return pE [K, d] for logits z/τ [K, V]."""
    return z.softmax(-1) @ table[: z.shape[-1]].to(z)


def log_density(z: Tensor, vectors: Tensor, table: Tensor, sigma: float) -> Tensor:
    """Return log q(h̃) = −‖h̃ − pE‖²/(2σ²) − (d/2)·log(2πσ²) [K], in nats per unit volume.

    `z` [K, V] are logits/τ, `vectors` h̃ [K, d], `table` E [V, d].
    """
    distance = (vectors.to(z) - mixtures(z, table)).square().sum(-1)
    return -distance / (2 * sigma**2) - vectors.shape[-1] / 2 * math.log(2 * math.pi * sigma**2)


def drawn_logprobs(z: Tensor, ids: Tensor, soft: SoftTokens | None, model: nn.Module) -> Tensor:
    """Return log π(y) of drawn tokens, log q(h̃) of soft ones [K], from logits/τ [K, V] and their ids [K]."""
    if soft is None:
        return z.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    here = soft.among(ids)
    discrete = z.log_softmax(-1).gather(-1, ids.masked_fill(here, 0)[:, None])[:, 0]
    density = log_density(z[here], soft.embed(ids[here]), embeddings_of(model).weight, soft.sigma)
    return discrete.index_put(here.nonzero(as_tuple=True), density)


@contextmanager
def soft_inputs(model: nn.Module, soft: SoftTokens | None) -> Iterator[None]:
    """Let a model read soft tokens by their ids inside the block; other tokens are looked up as always."""
    if soft is None:
        yield
        return
    table, read = embeddings_of(model), list[Tensor]()

    def hide_soft_ids(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read[:] = args[:1]
        return (args[0].masked_fill(soft.among(args[0]), 0), *args[1:])

    def insert_vectors(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # `where` stops the gradient there: the vector is given, no row of the table
        return torch.where(soft.among(read[0])[..., None], soft.embed(read[0]).to(output), output)

    with table.register_forward_pre_hook(hide_soft_ids), table.register_forward_hook(insert_vectors, prepend=True):
        yield
