"""Run by test_distributed.py, twice at a time: sketches and Gram matrices of a model that two processes share."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from otb_analysis.errors import InputError, ProcessError
from otb_analysis.gradients import gradient_sketch, group_gradient_gram, token_score_norms
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups import blocks, group_gram, layered
from otb_analysis.processes import Processes
from otb_analysis.rollouts.models import gathered

CLUSTER = np.array([4, 1, 4, 1])


def model(tied, layers=2):
    # 17 and 15 rows do not divide by two, so that the shards are uneven.
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=17, hidden_size=16, intermediate_size=15, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 17, (4, 9), generator=generator)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    mask[:, 3:] = True
    return ids, mask, torch.randn(4, 3, 9, generator=generator)


def sharded(tied, layers=2):
    whole = model(tied, layers)
    for layer in whole.model.layers:
        fully_shard(layer)
    return fully_shard(whole)


def refusal(call, kind=InputError):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def mixture():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def biased():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=17, hidden_size=16, intermediate_size=15, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval()


GROUPS = {"two": CLUSTER, "three": np.array([4, 1, 9, 1]), "one": np.zeros(4, int)}
MODELS = {"tied": lambda: model(True), "untied": lambda: model(False), "mixture": mixture, "biased": biased}


def one_whole_block(together, results):
    """Signals go back through five blocks of which one process keeps three inputs and the other all."""
    ids, mask, weights = batch()
    results["gram deep one"] = group_gradient_gram(model(True, 5), ids, mask, weights, CLUSTER)
    shards, whole, kept = sharded(True, 5), [], layered.INPUT_BYTES

    def noted(*_):
        held = [not isinstance(layer.mlp.up_proj.weight, DTensor) for layer in shards.model.layers]
        if not all(held):  # as they are in forward passes
            whole.append([at for at, one in enumerate(held) if one])

    with gathered(shards):
        group_gradient_gram(shards, ids, mask, weights, CLUSTER)  # checks the model
        norms = token_score_norms(shards, ids, mask)
        assert norms.engine == "fast"  # and not one backward pass a token, since FSDP2 has classes of its own
        results["norms deep one"] = token_score_norms(model(True, 5), ids, mask).norm_sq
        results["norms deep two"] = norms.norm_sq
        for layer in shards.model.layers:
            layer.register_forward_pre_hook(noted)
        layered.INPUT_BYTES = kept * together.rank
        results["gram deep two"] = group_gradient_gram(shards, ids, mask, weights, CLUSTER, processes=together)
        layered.INPUT_BYTES = kept
    again = [[4], [2], [3], [2], [0], [1], [0]]  # then up to the first block, which does not run
    assert whole == [*([[at] for at in range(4, -1, -1)] if together.rank else again), []], whole


def grams(together):
    """Every Gram matrix by one process and by two, and what is said where one of the two fails."""
    ids, mask, weights = batch()
    results = {}

    def both(name, make, group, weights=weights, **options):
        results[f"gram {name} one"] = group_gradient_gram(make(), ids, mask, weights, group, **options)
        found = group_gradient_gram(make(), ids, mask, weights, group, processes=together, **options)
        results[f"gram {name} two"] = found

    given, exchange = [], dist.all_to_all_single

    def sending(found, sent, received, parts, *args, **named):
        given.append(4 * (sum(parts) - parts[together.rank]))
        return exchange(found, sent, received, parts, *args, **named)

    dist.all_to_all_single = sending
    for tied in (True, False):  # as docs/scale.md has it: half of the gradients of three rows go to the other one
        given.clear()
        group_gradient_gram(make := model(tied), ids, mask, weights, CLUSTER, processes=together)
        most = 3 * 4 * sum(parameter.numel() for parameter in make.parameters()) // 2
        assert 0.99 * most <= sum(given) <= most and (not tied or sum(given) == most)  # tokens never read have no rows
    dist.all_to_all_single = exchange
    for name, make in MODELS.items():
        for scope in ("all", r"layers\.1", "lm_head"):
            both(f"{name} {scope}", make, CLUSTER, scope=scope)
    for name, group in GROUPS.items():
        both(f"groups {name}", MODELS["tied"], group)
    both("nothing", MODELS["tied"], CLUSTER, 0 * weights)
    both("plain", MODELS["tied"], CLUSTER, engine="reference")
    for name, value in {"slices": ("GRADIENT_BYTES", 1 << 14), "entries": ("ENTRY_BYTES", 1 << 12)}.items():
        where = sys.modules["otb_analysis.gradients." + {"slices": "exact.gram", "entries": "groups.vocabulary"}[name]]
        kept = getattr(where, value[0])
        setattr(where, *value)
        both(name, MODELS["tied"], GROUPS["three"])
        setattr(where, value[0], kept)
    # Numbers of 4 bytes in rows of 16, at a block's output and at its input, for three rows of nine positions
    one, kept, ran, run = 2 * 4 * 16 * 3 * 9, group_gram.free_bytes, [], group_gram._block_by_block

    def counted(*args):
        ran.append(args[-1].size)
        return run(*args)

    group_gram._block_by_block = counted
    # No rollout's signals fit: the first process does all. Two do: every two of process 0's meet process 1's.
    for name, (free, group, rounds) in {
        "no room": (1, "one", 0), "little room": (2 * one - 1, "two", 0), "rounds, first": (4 * one, "one", 6),
        "rounds, both": (4 * one, "three", 3),
    }.items():  # fmt: skip
        group_gram.free_bytes, ran[:] = lambda device: free, []  # noqa: B023
        both(name, MODELS["tied"], GROUPS[group])
        assert (ran.count(1), ran.count(2)) == (6 if rounds else 0, rounds), (name, ran)
    with gathered(shards := sharded(True)):
        arguments = ids, mask, weights, GROUPS["three"]
        results["gram rounds, sharded two"] = group_gradient_gram(shards, *arguments, processes=together)
    results["gram rounds, sharded one"] = results["gram rounds, both one"]
    assert ran[-3:] == [2, 2, 2]
    group_gram.free_bytes, group_gram._block_by_block = kept, run
    shards, through, whole = sharded(True), layered.Layered._through, []

    def watched(*args, **kwargs):
        whole.append([not isinstance(layer.mlp.up_proj.weight, DTensor) for layer in shards.model.layers])
        return through(*args, **kwargs)

    with gathered(shards):
        group_gradient_gram(shards, ids, mask, weights, CLUSTER)  # checks the model, with whole weights
        layered.Layered._through = watched
        results["gram sharded two"] = group_gradient_gram(shards, ids, mask, weights, CLUSTER, processes=together)
        results["gram after two"] = group_gradient_gram(shards, ids, mask, weights, CLUSTER)
        layered.Layered._through = through
    results["gram sharded one"] = results["gram after one"] = results["gram tied all one"]
    own = len(whole) // 3  # of one prompt here, and of both by one process
    assert whole[:own] == [[False, True], [True, False]] and whole[own:] == 2 * own * [[True, True]], whole
    one_whole_block(together, results)
    with gathered(shards):  # by one process, which the other waits for
        sketched = together.broadcast_from_main(lambda: gradient_sketch(shards, ids, mask, weights, CLUSTER, dim=64))
    results["gathered"] = sketched
    results["whole"] = gradient_sketch(MODELS["tied"](), ids, mask, weights, CLUSTER, dim=64)
    shards, kept = sharded(True, 5), layered.INPUT_BYTES
    with gathered(shards):
        group_gradient_gram(shards, ids, mask, weights, CLUSTER)  # checks the model
    layered.INPUT_BYTES = 0
    for of, at, kind in (
        *((layered.Layered, at, RuntimeError) for at in ("extent", "_through", "add")),
        (layered.Layered, "_through", UnfitError), (blocks.Call, "again", RuntimeError),
    ):  # fmt: skip
        whole = getattr(of, at)

        def broken(*args, **kwargs):
            raise kind("out of memory")  # noqa: B023

        if together.rank:
            setattr(of, at, broken)
        call = (shards, ids, mask, weights, CLUSTER)
        with gathered(shards):
            said = refusal(lambda: group_gradient_gram(*call, processes=together), (kind, ProcessError))  # noqa: B023
            assert not any(isinstance(parameter, DTensor) for parameter in shards.parameters())
        assert said == ("out of memory" if together.rank else "process 1 stopped: out of memory")
        setattr(of, at, whole)
    layered.INPUT_BYTES = kept
    uneven = (MODELS["tied"](), ids + 99 * together.rank, mask, weights, CLUSTER)  # a batch that one refuses
    said = refusal(lambda: group_gradient_gram(*uneven, processes=together), (InputError, ProcessError))
    assert said.startswith("process 1 stopped: ") or together.rank
    assert together.gather(together.rank) == [0, 1]  # both are at the same place
    return results


def main():
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    ids, mask, weights = batch()
    results = {}
    for tied in (True, False):
        for scope in ("all", r"layers\.1"):
            options = {"dim": 64, "seed": 3, "scope": scope}
            plain, shards = model(tied), sharded(tied)
            results[f"whole {tied} {scope}"] = gradient_sketch(plain, ids, mask, weights, CLUSTER, **options)
            shards(input_ids=ids)  # leaves the root's parameters gathered
            norm = shards.model.layers[0].input_layernorm.weight
            norm.grad = torch.full_like(norm, 3.0)
            results[f"shards {tied} {scope}"] = gradient_sketch(shards, ids, mask, weights, CLUSTER, **options)
            results[f"again {tied} {scope}"] = gradient_sketch(shards, ids, mask, weights, CLUSTER, **options)
            assert (norm.grad.to_local() == 3).all()
            assert all(p.grad is None for p in shards.parameters() if p is not norm)
    spread = DistributedDataParallel(model(True))
    own = slice(2 * rank, 2 * rank + 2)
    for key in ("ddp", "ddp again"):
        args = (ids[own], mask[own], weights[own], CLUSTER[own])
        results[key] = gradient_sketch(spread, *args, dim=64, seed=3)
    shards = sharded(True)
    different = refusal(lambda: gradient_sketch(shards, ids, mask, weights + rank, CLUSTER, dim=64))
    assert "pass the same batch on every process" in different
    assert "lm_head" in refusal(lambda: gradient_sketch(shards, ids, mask, weights, CLUSTER, scope="lm_head"))
    assert "gradient_sketch, which adds shards up" in refusal(lambda: token_score_norms(sharded(True), ids, mask))
    results |= grams(Processes(rank, 2, None, host=dist.group.WORLD))
    np.savez(Path(sys.argv[2]) / f"{rank}.npz", **results)
    dist.barrier()
    # A thread of gloo that lets go of a tensor while its group ends waits for ever.
    os._exit(0)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
