"""vLLM on a CPU: our generator on its engine, and TRL with vLLM in its own process or behind a server.

Two things of vLLM and TRL need a GPU, and stand-ins take their place: vLLM packs linear layers for a CPU when it loads
them and then takes no new weights, so they are left as they are; and TRL sends weights to a server by NCCL, so the
server reads them from disk here.
"""

import json
import os
import sys
from pathlib import Path

import torch

from otb_analysis.config import SmallModelConfig
from otb_analysis.rollouts.generation import VllmGenerator
from otb_analysis.rollouts.models import character_tokenizer, load_policy, small_model


def plain_layers():
    """Keep vLLM from packing the weights of linear layers for its CPU kernels."""
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def saved_policy(path):
    """Save a Qwen3-type model with heads of 32, which vLLM's attention for a CPU takes, off its initial values.

    Its input and output embeddings are two: of weights that both share, a server that reads them anew renews one only.
    """
    tokenizer, generator = character_tokenizer("0123456789+=;#"), torch.Generator().manual_seed(1)
    shape = SmallModelConfig(layers=2, width=64, heads=2, key_value_heads=1, feed_forward=32, tied=False)
    model = small_model(shape, tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def drawn_by_vllm(out):
    """Draw twice by one seed, then at another temperature and after two changes of the weights; return all of it."""
    saved_policy(out / "policy")
    model, tokenizer = load_policy(out / "policy")
    generator = VllmGenerator(model, tokenizer)
    contexts = [tokenizer(text)["input_ids"] for text in ("1+2=", "12+7+30=")] * 8
    rounds = []
    for temperature, factor in ((1.0, 1.0), (1.0, 1.0), (0.5, 1.0), (1.0, 1.3), (1.0, 0.5)):
        with torch.no_grad():
            if factor != 1.0:
                for weight in model.parameters():
                    weight.mul_(factor)
            torch.manual_seed(0)
            found = generator.generate(contexts, 8, temperature)
            gaps = []
            for context, one in zip(contexts, found, strict=True):
                logits = model(torch.tensor([context + one.token_ids])).logits[0, len(context) - 1 : -1]
                ours = (logits / temperature).log_softmax(-1)[range(len(one.token_ids)), one.token_ids]
                gaps.append((ours - torch.tensor(one.logprobs)).abs().max().item())
        rounds.append({"tokens": [one.token_ids for one in found], "gap": max(gaps), "end": generator.ends,
                       "finished": [one.finished for one in found]})  # fmt: skip
    return rounds


def sent_by_disk(policy):
    """Let TRL's client give its weights to the server by a folder; without `policy` the server keeps its first ones."""
    import requests
    from trl.generation.vllm_client import VLLMClient

    def update(self, metadata, named_params):
        if policy is None:
            return
        from safetensors.torch import save_file

        save_file({name: weight.contiguous() for name, weight in named_params}, policy / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(policy)}}
        requests.post(f"{self.base_url}/collective_rpc", json=body, timeout=60).raise_for_status()

    VLLMClient.init_communicator = lambda self, device: None
    VLLMClient.update_named_params = update


def trained_by_trl(out, monitor=True, ours=False, server="", synced=True, **spec):
    """Train three steps on rollouts of vLLM, colocated or of a `server`; return what was logged and the weights."""
    import trl_runs as runs
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from otb_analysis.integrations.monitor import OTBMonitor
    from otb_analysis.integrations.trl import OTBGRPOTrainer, RecordConfig

    if server:
        sent_by_disk(out / "policy" if synced else None)
    else:
        saved_policy(out / "policy")
    where = {"vllm_mode": "server", "vllm_server_base_url": server} if server else {"vllm_mode": "colocate"}
    settings = {
        "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8, "max_steps": 3,
        "learning_rate": 3e-2, "logging_steps": 1, "temperature": 0.8, "save_strategy": "no", "report_to": "none",
        "bf16": False, "use_vllm": True, "vllm_max_model_length": 64, "lr_scheduler_type": "constant",
    }  # fmt: skip
    arguments = GRPOConfig(str(out / "trl"), use_cpu=True, disable_tqdm=True, **(settings | where | spec))
    model, tokenizer = load_policy(out / "policy")
    trainer = (OTBGRPOTrainer if ours else GRPOTrainer)(
        model, [runs.odd], arguments, Dataset.from_dict({"prompt": runs.PROMPTS}), processing_class=tokenizer,
        callbacks=[OTBMonitor(out / "run", share=float("inf"))] if monitor and not ours else None,
        **({"estimator": "otb_loo", "record": RecordConfig(run="run", root=out)} if ours else {}),
    )  # fmt: skip
    trainer.train()
    torch.save(trainer.model.state_dict(), out / "weights.pt")
    return trainer.state.log_history


def main():
    what, out, spec = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    plain_layers()
    (out / "said.json").write_text(json.dumps({"drawn": drawn_by_vllm, "trl": trained_by_trl}[what](out, **spec)))
    os._exit(0)  # threads of gloo that let go of tensors while the interpreter ends can abort it


if __name__ == "__main__":
    main()
