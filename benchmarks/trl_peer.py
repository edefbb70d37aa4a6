"""TRL's fused head on given hidden states, for `otb bench logits`; needs torch and trl>=1.16,<1.17 and nothing of ours.

Started by `peer`: one JSON argument, one line of facts, then one line of seconds for every line on the input.
"""

import importlib
import json
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

SIDE = run_path(str(Path(__file__).with_name("peer_side.py")))
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs")


class Backbone(nn.Module):
    """Returns given hidden states, whatever its input."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Return the hidden states under the name that TRL reads."""
        return SimpleNamespace(last_hidden_state=self.hidden)


class Head(nn.Module):
    """The least that `add_fused_lm_head` asks of a model: a backbone, an output layer and a configuration."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        super().__init__()
        self.base_model = Backbone(hidden)
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
        self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="none"))

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        """Never called: the fused head takes its place."""
        return self.lm_head(self.base_model(input_ids).last_hidden_state)


def fused_call(add_fused_lm_head: Any, inputs: dict[str, Any]) -> Any:
    """Return the call to be timed."""
    hidden, weight, token_ids = SIDE["head_inputs"](**inputs)
    model: Any = Head(hidden[None], weight)
    add_fused_lm_head(model, outputs=OUTPUTS)
    return torch.no_grad()(lambda: model(token_ids[None], shift_labels=token_ids[None], fused_lm_head=True))


def main() -> None:
    """Prepare, say so, then run once per line."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    add_fused_lm_head = importlib.import_module("trl.trainer.utils").add_fused_lm_head
    inputs = spec["inputs"]
    fused_call(add_fused_lm_head, inputs | {"rows": 4, "vocabulary": 300})()
    run = fused_call(add_fused_lm_head, inputs)
    held = SIDE["peak"](run, inputs["device"])
    SIDE["say"]({"logprob": run().log_probs[0, : spec["checked"]].double().tolist(), "bytes": held})
    SIDE["take_turns"](run, inputs["device"])


if __name__ == "__main__":
    main()
