r"""An environment of verifiers 0.4.0, asked about sums in two turns; `traces.jsonl` is what `vf-eval` wrote of it.

In an environment of its own with `pip install verifiers==0.4.0`, and with `server.py` running (it says how), all in
this folder, where `smollm2` is a link to the model's directory:

    PYTHONPATH=. vf-eval tiny_sums --env.agent.harness.id tiny_sums --env.agent.runtime.type subprocess \
        --model smollm2 --client.type train --client.base-url http://127.0.0.1:8765/v1 \
        --client.renderer.name default --sampling.max-tokens 20 --sampling.temperature 1.0 \
        -n 3 -r 3 -c 8 --no-push --no-rich

Nothing was changed but `agent.runtime.id`, which held a path of the machine.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    """One sum and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Rewarded by both replies."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the answer stands in the last reply."""
        return float(self.data.answer in (trace.assistant_messages[-1].content or ""))

    @vf.reward(weight=0.5)
    async def form(self, trace: vf.Trace) -> float:
        """1 where the first reply has a digit."""
        return float(any(sign.isdigit() for sign in trace.assistant_messages[0].content or ""))


class SumConfig(vf.TasksetConfig):
    """How many sums."""

    num_tasks: int = 4


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """The sums."""

    def load(self) -> list[SumTask]:
        """Return them."""
        pairs = [(2, 3), (4, 4), (5, 1), (3, 6), (7, 2), (1, 8)][: self.config.num_tasks]
        return [
            SumTask(SumData(prompt=f"What is {a}+{b}? Reply with a number.", answer=str(a + b)), self.config.task)
            for a, b in pairs
        ]


class SumHarnessConfig(vf.HarnessConfig):
    """How often the model is asked."""

    turns: int = 2


class SumHarness(vf.Harness[SumHarnessConfig]):
    """Asks the model from this process: it needs no container, and no uv to install a program there."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more) -> vf.ProgramResult:
        """Ask, and ask again."""
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(self.config.turns):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "Are you sure?"})
        return vf.ProgramResult(0, "", "")


__all__ = ["SumHarness", "SumTaskset"]
