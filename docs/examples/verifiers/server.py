"""vLLM's `/inference/v1/generate` on a CPU: samples from a checkpoint and returns log-probabilities.

    python docs/examples/verifiers/server.py path/to/smollm2 8765 0

The arguments are the checkpoint, the port and the seed. Temperature 1, one request at a time, no cache: for a few short
rollouts only.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

MODEL = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
torch.manual_seed(int(sys.argv[3]))
LOCK = threading.Lock()


def sample(prompt: list[int], stops: list[int], limit: int) -> tuple[list[int], list[float], str]:
    """Return sampled ids, their log-probabilities, and why it ended."""
    ids, logprobs = [], []
    with torch.no_grad():
        while len(ids) < limit:
            logits = MODEL(torch.tensor([prompt + ids])).logits[0, -1].double()
            row = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(row.exp(), 1))
            ids.append(token)
            logprobs.append(float(row[token]))
            if token in stops:
                return ids, logprobs, "stop"
    return ids, logprobs, "length"


class Handler(BaseHTTPRequestHandler):
    """One model, one request at a time."""

    def answer(self, body: dict) -> None:
        """Send JSON."""
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        """Know no models: then no length is checked."""
        self.answer({"object": "list", "data": []})

    def do_POST(self) -> None:
        """Sample one completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = body["sampling_params"]
        with LOCK:
            ids, logprobs, why = sample(body["token_ids"], params["stop_token_ids"], params.get("max_tokens", 16))
        content = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": why}
        self.answer({"request_id": "r", "choices": [choice]})

    def log_message(self, *words: object) -> None:
        """Say nothing."""


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
