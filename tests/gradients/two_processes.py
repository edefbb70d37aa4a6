"""Run by test_sketch_distributed.py, twice at a time: sketches of a model that two processes share."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

from otb_analysis.errors import InputError
from otb_analysis.gradients import gradient_sketch, token_score_norms

CLUSTER = np.array([4, 1, 4, 1])


def model(tied):
    # 17 and 15 rows do not divide by two, so that the shards are uneven.
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=17, hidden_size=16, intermediate_size=15, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 17, (4, 9), generator=generator)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    mask[:, 3:] = True
    return ids, mask, torch.randn(4, 3, 9, generator=generator)


def sharded(tied):
    whole = model(tied)
    for layer in whole.model.layers:
        fully_shard(layer)
    return fully_shard(whole)


def refusal(call):
    try:
        call()
    except InputError as error:
        return str(error)
    raise AssertionError("nothing was refused")


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
    np.savez(Path(sys.argv[2]) / f"{rank}.npz", **results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
