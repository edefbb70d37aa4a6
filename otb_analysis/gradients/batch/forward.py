"""How the rollouts of one forward pass lie in it, and the one place where log-probabilities are shifted.

The logits at index t − 1 predict token t. `sampled_logprobs` runs the model as it is, `Functional` at other weights of
the scope, without writing to the model. A pass has a padded row for each rollout, or their prefix tree in one row.

Rollouts of one prompt, side by side:      packed:

    P P P a b ·                            P P P a b c d e f
    P P P a c ·                            positions 0 1 2 3 4 4 3 4 5
    P P P d e f                            b reads P and a, c reads P and a, f reads P, d and e

The packed row reads everything that rollouts have in common once, prompt or sampled, and holds no padding; its
attention mask shows each token what stands before it in its own text, so every log-probability and every gradient is
that of the padded rows up to rounding.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from otb_analysis.errors import InputError, NonFiniteError, nearest
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, microbatches
from otb_analysis.gradients.batch.kernels import layer_by_layer, plain_kernels
from otb_analysis.gradients.batch.scope import end_of, layer_input
from otb_analysis.gradients.batch.soft import SoftTokens, drawn_logprobs, soft_inputs
from otb_analysis.types import Float, Int


@dataclass(frozen=True)
class Tree:
    """Every distinct beginning of some texts is a node, named by its last token; parents come before their children."""

    token: Int  # Last token of each beginning [n]
    parent: Int  # Node of the beginning without it [n]; −1 for a first token
    depth: Int  # Index of that token in its text [n]
    paths: tuple[Int, ...]  # By text, the nodes of its beginnings, shortest first
    read: Int  # Increasing nodes that some text reads before its last token


def tree_of(rollouts: Sequence[Rollout]) -> Tree:
    """Build the tree of some rollouts, each up to its last sampled token."""
    known: dict[tuple[int, int], int] = {}
    paths, depth = [], []
    for rollout in rollouts:
        node, path = -1, []
        for index, token in enumerate(rollout.ids[: rollout.length + 1].tolist()):
            before = len(known)
            node = known.setdefault((node, token), before)
            if node == before:
                depth.append(index)
            path.append(node)
        paths.append(np.array(path, dtype=np.int64))
    parent, token = np.array(list(known), dtype=np.int64).reshape(-1, 2).T
    read = np.unique(np.concatenate([path[:-1] for path in paths])) if paths else token[:0]
    return Tree(token, parent, np.array(depth, dtype=np.int64), tuple(paths), read)


def sampled_nodes(rollouts: Sequence[Rollout], tree: Tree) -> Int:
    """Return the node of every sampled token [Σ K]: equal nodes have equal scores."""
    return np.concatenate([path[r.targets.cpu().numpy()] for r, path in zip(rollouts, tree.paths, strict=True)])


PACKED_ALWAYS, PACKED_RATIO = 1024, 4
"""Attention works on all pairs of a packed row's positions, four times those of the rollouts at most; where a row is
short its attention costs little beside its layers."""


@dataclass(frozen=True)
class Layout:
    """What a model is called with, and where it predicts the sampled tokens."""

    ids: Tensor  # Token ids [n, ℓ]
    keep: Tensor  # Increasing positions at which some sampled token is predicted [|keep|]
    # Row of each sampled token [Σ K] among the n · |keep| predictions; None where that is their order
    at: Tensor | None
    # Attention mask and position ids, where the model's own defaults would not do
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def pick(self, values: Tensor) -> Tensor:
        """Return one row per sampled token [Σ K, ·] of values at all positions [n, ℓ, ·] or at the kept ones."""
        kept = values if values.shape[1] == len(self.keep) else values[:, self.keep]
        flat = kept.flatten(0, 1)
        return flat if self.at is None else flat.index_select(0, self.at)


def padded(rollouts: tuple[Rollout, ...]) -> Layout:
    """Return one row per rollout, padded on the right, where causal attention never looks."""
    # No attention mask says what is padding: in a sliding window that holds padding only, it would leave nothing to
    # attend to, and the NaN of that row would reach the real tokens of later layers as 0 · NaN.
    # The output layer is the widest: it runs at the union of all rows' positions only.
    keep = torch.cat([r.targets for r in rollouts]).unique() - 1
    prefixes = [r.ids[: r.length] for r in rollouts]
    ids = pad_sequence(prefixes, batch_first=True)
    at = None
    if len(rollouts) * len(keep) > sum(len(r.targets) for r in rollouts):
        at = torch.cat([n * len(keep) + torch.searchsorted(keep, r.targets - 1) for n, r in enumerate(rollouts)])
    return Layout(ids, keep, at)


def packed(rollouts: tuple[Rollout, ...], tree: Tree, dtype: torch.dtype) -> Layout:
    """Return one row of all that the rollouts read; `dtype` is that of the activations."""
    device = rollouts[0].ids.device
    nodes = tree.read
    place = np.full(len(tree.token) + 1, -1)
    place[nodes] = np.arange(len(nodes))
    # Node i reads node j: j is i or stands before it in its text. A parent comes before its children, so its row is
    # complete. place[-1] stays −1: a first token has no parent.
    reads = np.eye(len(nodes), dtype=bool)
    for i, parent in enumerate(place[tree.parent[nodes]]):
        if parent >= 0:
            reads[i] |= reads[parent]
    mask = torch.zeros(1, 1, len(nodes), len(nodes), dtype=dtype, device=device)
    # Additive, not boolean: eager attention adds what it is given. The least finite number is what the
    # models themselves put into their masks.
    mask.masked_fill_(~torch.from_numpy(reads).to(device), torch.finfo(dtype).min)
    # A token is predicted at the node before it, which several tokens may share.
    before = [path[r.targets.cpu().numpy() - 1] for r, path in zip(rollouts, tree.paths, strict=True)]
    keep, at = np.unique(np.searchsorted(nodes, np.concatenate(before)), return_inverse=True)
    ids, keep, at, positions = (
        torch.from_numpy(x).to(device) for x in (tree.token[nodes], keep, at, tree.depth[nodes])
    )
    return Layout(ids[None], keep, at, {"attention_mask": mask, "position_ids": positions[None]})


def packing_pays(tree: Tree) -> bool:
    """Whether one packed row is less work than a padded row for each rollout."""
    lengths = np.array([len(path) - 1 for path in tree.paths])
    row = len(tree.read)
    short = row <= PACKED_ALWAYS or row * row <= PACKED_RATIO * int((lengths**2).sum())
    return short and row < len(lengths) * int(lengths.max())


BLOCK = 32
"""Tokens whose rows of the output layer are widened to float64 at a time."""
NEVER = -1
_PACKED: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""By model, kind of attention and dtype, how long the rollouts are up to which packing was seen right, or NEVER."""
Direction = Mapping[str, Tensor]
"""One tensor per parameter name; parameters in scope that are left out do not move."""


@dataclass(frozen=True)
class SampledLogits:
    """One forward pass: logits as the model gave them, and those of the policy at the sampled tokens."""

    logits: Tensor
    layout: Layout
    z: Tensor  # z_t / τ [Σ K, V]
    targets: Tensor  # y_t [Σ K]


def sampled_logprobs(batch: ScoreBatch, rollouts: tuple[Rollout, ...], layout: Layout | None = None) -> Tensor:
    """Log-probabilities of every sampled token of some rollouts [Σ K], from one forward pass, with its graph.

    log π(y_t) = z_t[y_t] − lse(z_t), z_t = logits at index t − 1, divided by the temperature, in float32 or better.
    Each rollout is run up to the last token that a sampled one is predicted from. Of soft tokens it is the log-density.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    run = sampled_logits(batch, rollouts, batch.temperature, layout)
    return drawn_logprobs(run.z, run.targets, batch.soft, batch.model)


def sampled_logits(
    batch: ScoreBatch, rollouts: tuple[Rollout, ...], temperature: float, layout: Layout | None = None
) -> SampledLogits:
    """Logits at a temperature behind `sampled_logprobs`, with their graph."""
    layout = padded(rollouts) if layout is None else layout
    with batch.scope.active(), soft_inputs(batch.model, batch.soft), layer_by_layer(batch.model):
        logits = model_logits(batch.model, layout)
    z = policy_logits(layout.pick(logits), rollouts, temperature, batch.soft)
    return SampledLogits(logits, layout, z, torch.cat([r.ids[r.targets] for r in rollouts]))


def policy_logits(
    logits: Tensor, rollouts: tuple[Rollout, ...], temperature: float, soft: SoftTokens | None = None, first: int = 0
) -> Tensor:
    """Logits of the policy that sampled, z / τ in float32 or better, from the model's of all Σ K tokens or of a slice.

    Args:
        logits: [n, V], of the sampled tokens `first`, `first` + 1, ….

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:  # where it is 1 there is no copy
        z = z / temperature
    # One NaN or infinity makes the sum so, which takes a fifth of the time; finite logits may overflow it, hence the
    # second look.
    if not z.detach().sum().isfinite() and (bad := ~z.detach().isfinite().all(-1)).any():
        row, column = [(r.row, c) for r in rollouts for c in r.columns][first + int(bad.nonzero()[0])]
        raise NonFiniteError(
            f"logits are not finite at rollout {row}, token {column}; check the model's weights for NaN or infinity, "
            "or load it in float32."
        )
    ids = torch.cat([r.ids[r.targets] for r in rollouts])
    ids = ids if soft is None else ids[~soft.among(ids)]
    if len(ids) and int(ids.max()) >= z.shape[-1]:
        raise InputError(
            f"input_ids holds the sampled token {int(ids.max())} but the output layer has {z.shape[-1]} entries; "
            "encode the text with this model's own tokenizer."
        )
    return z


@torch.no_grad()
def sharp_logprobs(batch: ScoreBatch, rollouts: tuple[Rollout, ...]) -> Tensor:
    """Log-probabilities [Σ K] as from `sampled_logprobs`, without a graph, in float64, nearly free of float32 rounding.

    A model whose logits are not what a linear output layer returned (scaled, soft-capped, adapted, quantised) keeps
    them as they are, and so does scope "lm_head".
    """
    # When logits round, log π(y) moves by δz_y − Σ_v π_v δz_v: the logits of y and of the likeliest token matter most.
    # Those are taken again as float64 products of the output layer's weight with its own input, and exponentials are
    # summed in float64: rounding falls several times at the price of two rows of the product.
    calls, head = list[tuple[Tensor, Tensor, Tensor, Tensor | None]](), end_of(batch.model, "output")

    def note(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        # The weights of this call: `Functional` swaps them under the model.
        calls.append((output, layer_input(args, kwargs), module.weight, module.bias))

    plain = type(head) is nn.Linear
    with head.register_forward_hook(note, with_kwargs=True) if plain else nullcontext():
        run = sampled_logits(batch, rollouts, 1.0)
    # The largest logit is taken off before exponentials, so that none overflows.
    peak, likeliest = run.z.max(-1, keepdim=True)
    columns = torch.cat([run.targets[:, None], likeliest], dim=-1)
    sharp = rough = run.z.gather(-1, columns).double()
    untouched = calls and (run.logits.data_ptr(), run.logits.shape) == (calls[-1][0].data_ptr(), calls[-1][0].shape)
    if untouched:
        _, inputs, weight, bias = calls[-1]
        # Some tokens at a time: the gathered rows of the weight are float64 copies, of [BLOCK, k, d] each.
        blocks = zip(columns.split(BLOCK), run.layout.pick(inputs).double().split(BLOCK), strict=True)
        sharp = torch.cat([(weight[c].double() * h[:, None]).sum(-1) for c, h in blocks])
        if bias is not None:
            sharp = sharp + bias[columns].double()
    # The sum is corrected where it matters: the term of the likeliest token is replaced by its sharper value.
    total = (run.z - peak).div_(batch.temperature).exp_().sum(-1, dtype=torch.float64)
    sharp, rough = ((x - peak) / batch.temperature for x in (sharp, rough))
    moved = sharp[:, 1:].exp() - rough[:, 1:].exp()
    return sharp[:, 0] - (total + moved.sum(-1)).log()


def model_logits(model: nn.Module, layout: Layout) -> Tensor:
    """Logits without a key-value cache, at the kept positions only [n, |keep|, V] where the model can do that."""
    inputs = {"input_ids": layout.ids, "use_cache": False, **layout.inputs}
    replaced = vars(model).get("forward")
    # A method replaced on the object is not looked up in the cache, which would keep the object alive.
    if _takes_kept.__wrapped__(replaced) if replaced else _takes_kept(type(model).forward):
        return model(**inputs, logits_to_keep=layout.keep).logits
    return model(**inputs).logits


@lru_cache(maxsize=16)  # reading a signature takes longer than a small layer
def _takes_kept(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


def layout_of(batch: ScoreBatch, rollouts: tuple[Rollout, ...], tree: Tree | None = None) -> Layout:
    """One packed row where that is less work and the model gives it the same numbers, else a padded row per rollout."""
    plain = padded(rollouts)
    attention = getattr(getattr(batch.model, "config", None), "_attn_implementation", None)
    kind = next(batch.model.parameters()).dtype
    tree = tree_of(rollouts) if tree is None else tree
    # Weights that are packed in bytes have activations of some other dtype.
    if attention not in ("eager", "sdpa") or kind.itemsize < 4 or not packing_pays(tree):
        return plain
    one_row = packed(rollouts, tree, kind)
    longest, seen = max(r.length for r in rollouts), _PACKED.setdefault(batch.model, {})
    key = f"{attention} {kind}"
    # A window of attention, or any other use of where tokens lie, shows in the log-probabilities as soon as it matters.
    # So they are compared again for every rollout that is longer than those seen right before.
    if key not in seen or 0 < seen[key] < longest:
        with torch.no_grad():
            expected, seen[key] = sampled_logprobs(batch, rollouts, plain), NEVER
            # An error is how a model says that it takes no such mask.
            with suppress(RuntimeError, ValueError, TypeError, IndexError, NonFiniteError):
                got = sampled_logprobs(batch, rollouts, one_row)
                seen[key] = longest if torch.allclose(got, expected, rtol=0, atol=1e-4) else NEVER
    return plain if seen[key] == NEVER else one_row


@dataclass(frozen=True)
class Functional:
    """log π of sampled tokens as a function of the tensors in scope."""

    batch: ScoreBatch

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The scope's tensors at the model's own weights."""
        return tuple(p.detach() for p in self.batch.scope.parameters)

    def logprobs(
        self,
        parameters: Sequence[Tensor],
        rollouts: tuple[Rollout, ...],
        forward: Callable[[ScoreBatch, tuple[Rollout, ...]], Tensor] = sampled_logprobs,
    ) -> Tensor:
        """Log-probabilities [Σ K] of the rollouts' sampled tokens with `parameters` in place of the scope's."""
        model, scope, named = self.batch.model, self.batch.scope, dict[str, Tensor]()
        if scope.head is None:
            named = {f"model.{name}": tensor for name, tensor in zip(scope.names, parameters, strict=True)}
        else:
            scope = replace(scope, parameters=tuple(parameters))
        tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None)
        rows = {table: table.weight[table.padding_idx].detach() for table in tables}

        def hold(table: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # `where`, not an assignment: it has a derivative in both modes, zero for the padding row.
            return torch.where((args[0] == table.padding_idx)[..., None], rows[table].to(output), output)  # pyright: ignore

        call = nn.Module()  # holds the model, so that `functional_call` can swap the weights under a whole pass
        call.model, call.forward = model, partial(forward, replace(self.batch, scope=scope), rollouts)
        with plain_kernels(model), ExitStack() as handles:
            # The reverse pass gives the padding token's row no gradient, and a text may hold that token: without this
            # the other methods would disagree with it.
            for table in rows:
                handles.enter_context(table.register_forward_hook(hold))
            # Tied names must move together, though only one of them is in `named`.
            return functional_call(call, named, (), tie_weights=True)

    @torch.no_grad()
    def evaluate(self, parameters: Sequence[Tensor], rollouts: tuple[Rollout, ...]) -> Float:
        """The same without a graph and with as little rounding as is cheap, as float64 [N, L]; zero elsewhere."""
        result = np.zeros(self.batch.shape)
        for micro in microbatches(rollouts):
            scatter(result, micro, self.logprobs(parameters, micro, sharp_logprobs))
        return result

    def gradient(self, weights: Float, rollouts: tuple[Rollout, ...]) -> tuple[Tensor, ...]:
        """Σ weights[n, t] s_{n,t} over some rollouts by one ordinary backward pass; weights [N, L]."""
        leaves = [p.detach().requires_grad_() for p in self.parameters]
        total: list[Tensor | None] = [None] * len(leaves)
        for micro in microbatches([r for r in rollouts if weights[r.row, r.columns].any()]):
            row = np.concatenate([weights[r.row, r.columns] for r in micro])
            forward = partial(sampled_logprobs, layout=layout_of(self.batch, micro))
            values = self.logprobs(leaves, micro, forward)
            # Fresh leaves, so that nothing is written to the model's own `.grad`. A parameter may have no part in these
            # tokens.
            grads = torch.autograd.grad(values, leaves, torch.from_numpy(row).to(values), allow_unused=True)
            # The first gradient is the sum so far: another copy would take as much memory as the weights.
            total = [g if t is None else t if g is None else t.add_(g) for t, g in zip(total, grads, strict=True)]
            del grads
        return tuple(torch.zeros_like(p) if t is None else t for t, p in zip(total, self.parameters, strict=True))


def check_direction(direction: Direction, function: Functional) -> tuple[Tensor, ...]:
    """Turn tensors by name (of a tied parameter, any) into one tensor per tensor in scope, zeros by default.

    Raises:
        InputError: A name is not in scope, a shape does not fit, a tied parameter would move in two ways, or there is
            no tensor at all.
        NonFiniteError: A tensor holds NaN or infinity.
    """
    moves: dict[int, Tensor] = {}
    scope, named = function.batch.scope, function.batch.model.named_parameters(remove_duplicate=False)
    place = {id(p): i for i, p in enumerate(scope.parameters)}
    # Every name of a tied parameter counts.
    index = {name: i for i, name in enumerate(scope.names)} | {n: place[id(p)] for n, p in named if id(p) in place}
    for name, tensor in direction.items():
        if name not in index:
            raise InputError(f"direction names {name!r}, which is not in scope; {nearest(name, index)}")
        like = function.parameters[i := index[name]]
        if tensor.shape != like.shape:
            raise InputError(
                f"direction[{name!r}] has shape {tuple(tensor.shape)} but the parameter has shape {tuple(like.shape)}; "
                "pass one entry per parameter entry."
            )
        moved = tensor.detach().to(like)
        # A finite norm has finite entries, and reads a tensor ten times as fast; finite entries may still overflow.
        if not (torch.linalg.vector_norm(moved).isfinite() or moved.isfinite().all()):
            raise NonFiniteError(f"direction[{name!r}] is not finite; pass finite tensors.")
        if i in moves and not torch.equal(moves[i], moved):
            raise InputError(
                f"direction moves the tied parameter {scope.names[i]!r} differently under another name, "
                f"{name!r}; pass it once."
            )
        moves[i] = moved
    if not moves:
        raise InputError("direction is empty; pass one tensor per parameter name.")
    return tuple(moves[i] if i in moves else torch.zeros_like(p) for i, p in enumerate(function.parameters))


def scatter(into: Float, rollouts: Sequence[Rollout], values: Tensor) -> None:
    """Write one value per sampled token [Σ K] of some rollouts to their places in `into` [N, L]."""
    ends = np.cumsum([len(r.columns) for r in rollouts])[:-1]
    for rollout, part in zip(rollouts, np.split(values.detach().double().cpu().numpy(), ends), strict=True):
        into[rollout.row, rollout.columns] = part
