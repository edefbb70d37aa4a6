"""What a measured step costs at any size, from formulas: multiplications, bytes that are held and sent, seconds.

`tests/benchmarks/test_scale.py` holds the operations and the bytes against calls of the library at two sizes.
"""

from dataclasses import dataclass

from benchmarks.config import ScaleConfig
from benchmarks.publish import Report, notes_of, report_of

COLUMNS = {
    "what": "{what}", "operations": "{flops:.2g}", "÷ a training step": "{ratio:.2g}",
    "GB held by a process": lambda row: None if row["held"] is None else f"{row['held'] / 1e9:.3g}",
    "GB sent by a process": lambda row: None if row["sent"] is None else f"{row['sent'] / 1e9:.3g}",
    "seconds": "{seconds:.3g}",
}  # fmt: skip
FLOAT = 4
"""Bytes of a number: gradients are measured in float32."""


@dataclass(frozen=True)
class Costs(ScaleConfig):
    """Operations and bytes of one step of a decoder without biases; attention's own products are left out.

    A multiplication and an addition are two operations. Tokens of a prompt are read once for all of its rollouts.
    """

    @property
    def inside(self) -> int:
        """Parameters of the blocks' matrices."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.inner)

    @property
    def ends(self) -> int:
        """Parameters of one matrix of the vocabulary."""
        return self.vocabulary * self.width

    @property
    def read(self) -> int:
        """Positions that run through the blocks."""
        return self.prompts * (self.prompt_tokens + self.group_size * self.tokens)

    @property
    def sampled(self) -> int:
        """Tokens that were sampled."""
        return self.prompts * self.group_size * self.tokens

    @property
    def training(self) -> float:
        """One forward and backward pass."""
        return 6.0 * (self.inside * self.read + self.ends * self.sampled)

    @property
    def gram(self) -> float:
        """Every estimator's gradient: two passes forward and `rows` backward ones, and the products of all rows."""
        passes = (4 + 4 * self.rows) * self.inside * self.read + (6 + 2 * self.rows) * self.ends * self.sampled
        return float(passes + (self.prompts * self.rows) ** 2 * (self.inside + 2 * self.ends))

    @property
    def norms(self) -> float:
        """Exact norms of all tokens, at most: a signal of each goes back through its text and all blocks."""
        return 2.0 * self.inside * self.sampled * (self.prompt_tokens + self.tokens)

    @property
    def signals(self) -> float:
        """Bytes of the backward signals of one process's rows, at a block's output and at its input."""
        own = -(-self.prompts // self.processes)
        each = self.group_size * (self.prompt_tokens + self.tokens - 1)  # the last token is not read
        return 2.0 * FLOAT * self.width * self.rows * own * each

    @property
    def sent(self) -> float:
        """Bytes of gradients that one process sends to the others."""
        own = self.rows * -(-self.prompts // self.processes)
        return FLOAT * own * (self.inside + 2.0 * self.ends) * (1 - 1 / self.processes)


def run(config: ScaleConfig) -> Report:
    """Print what every level of a measured step would take; nothing is run."""
    costs = Costs(**vars(config))
    speed, link = config.teraflops * 1e12, config.gigabytes * 1e9
    drawn = min(1.0, config.drawn / (config.group_size * config.tokens))
    weights = FLOAT * (costs.inside + 2.0 * costs.ends)
    levels = {
        "a training step": (costs.training, None, None, config.processes),
        "forward: proxies, entropy, the sampling check": (0.0, None, None, config.processes),
        "every estimator's gradient": (costs.gram, weights + costs.signals, costs.sent, config.processes),
        f"norms of {config.drawn} drawn tokens of a prompt": (costs.norms * drawn, weights, 0.0, config.processes),
        "norms of all tokens": (costs.norms, weights, 0.0, config.processes),
    }
    rows = [
        {"what": what, "flops": flops, "ratio": flops / costs.training, "held": held, "sent": sent}
        | {"seconds": flops / (speed * workers) + (sent or 0.0) / link}
        for what, (flops, held, sent, workers) in levels.items()
    ]
    model = f"{(costs.inside + 2 * costs.ends) / 1e9:.1f} billion parameters"
    step = f"{config.prompts} prompts × {config.group_size} rollouts of {config.tokens:,} tokens"
    title = f"On paper: {model}, {step}, {config.processes} GPUs"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, costs=costs))
