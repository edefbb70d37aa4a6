"""What a measured step costs at any size, from formulas: multiplications, bytes that are held and sent, seconds.

`tests/benchmarks/test_scale.py` holds the operations and the bytes against calls of the library at two sizes.
"""

from dataclasses import dataclass

from benchmarks.config import ScaleConfig
from benchmarks.publish import Report, notes_of, report_of
from otb_analysis.gradients.manual.backward import SCORE_BYTES
from otb_analysis.gradients.manual.fast import BLOCK, SIGNAL_BYTES
from otb_analysis.gradients.manual.forward import SLICE_BYTES
from otb_analysis.gradients.sketched.tangents import ROWS

COLUMNS = {
    "what": "{what}", "operations": "{flops:.2g}", "÷ a training step": "{ratio:.2g}",
    "GB held by a process": lambda row: None if row["held"] is None else f"{row['held'] / 1e9:.3g}",
    "GB sent by a process": lambda row: None if row["sent"] is None else f"{row['sent'] / 1e9:.3g}",
    "seconds": "{seconds:.3g}",
}  # fmt: skip
FLOAT = 4
"""Bytes of a number: gradients are measured in float32."""


@dataclass(frozen=True)
class Rounds:
    """In which parts signals go back through the blocks, where they do not fit in memory together."""

    rounds: int
    times: int  # How often a part goes back: with each of the others once
    rows: float  # Of a process in a round
    held: float  # Bytes of their signals
    cut: bool = False  # Whether prompts are cut into their rollouts


@dataclass(frozen=True)
class Costs(ScaleConfig):
    """Operations and bytes of one step of a decoder without biases.

    A multiplication and an addition are two operations. Tokens of a prompt are read once for all of its rollouts.
    """

    @property
    def blocks(self) -> int:
        """Parameters of the blocks' matrices."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.inner)

    @property
    def attention(self) -> float:
        """Multiplications of scores and values a position: half of a rollout's square, the rest is masked."""
        return float(self.layers * self.width * (self.prompt_tokens + self.tokens))

    @property
    def through(self) -> float:
        """Multiplications a position in the blocks: those of weights, and of attention."""
        return self.blocks + self.attention

    @property
    def embedding(self) -> int:
        """Parameters of one matrix of the vocabulary."""
        return self.vocabulary * self.width

    @property
    def read(self) -> int:
        """Positions that run through the blocks."""
        return self.prompts * (self.prompt_tokens + self.group_size * self.tokens)

    @property
    def positions(self) -> int:
        """The same, where every rollout reads its prompt."""
        return self.prompts * self.group_size * (self.prompt_tokens + self.tokens)

    @property
    def sampled(self) -> int:
        """Tokens that were sampled."""
        return self.prompts * self.group_size * self.tokens

    @property
    def training(self) -> float:
        """One forward and backward pass."""
        return 6.0 * (self.through * self.read + self.embedding * self.sampled)

    def gram(self, way: Rounds) -> float:
        """Every estimator's gradient: two passes forward and one backward a row, and the products of all rows."""
        rows, read = (self.rows_alone, self.positions) if way.cut else (self.rows, self.read)
        passes = (4 + 4 * rows) * self.through * read + (6 + 2 * rows) * self.embedding * self.sampled
        products = (self.processes * way.rows) ** 2 * (self.blocks + 2 * self.embedding)
        return way.times * float(passes) + way.rounds * products

    @property
    def norms(self) -> float:
        """Exact norms of all tokens, at most: a signal of each goes back through its text and all blocks.

        Both factors of a product of attention pass a signal on, of a weight's only one.
        """
        return 2.0 * (self.through + self.attention) * self.sampled * (self.prompt_tokens + self.tokens)

    @property
    def sketch(self) -> float:
        """Sketched norms: two passes forward, and a backward signal of each direction from the last attention on.

        Every rollout reads its prompt.
        """
        below = self.blocks - self.width * (self.width + 3 * self.inner) + 2 * self.attention
        each = 4.0 * self.through + 2.0 * self.directions * below
        return each * self.positions + 4.0 * self.embedding * self.sampled

    @property
    def attribution(self) -> float:
        """Attribution with its split: a backward pass and two forward-mode ones, of three products a weight each.

        Every rollout reads its prompt.
        """
        return 18.0 * (self.through * self.positions + self.embedding * self.sampled)

    @property
    def contrast(self) -> tuple[float, float]:
        """Fitting four copies, and scoring each rollout by two of them; a prompt's tokens get logits, too."""
        fitted = 4 * self.steps * self.batch * (self.prompt_tokens + self.tokens)
        each = self.through + self.embedding
        return 6.0 * each * fitted, 4.0 * each * self.positions

    @property
    def drawn_norms(self) -> float:
        """Exact norms of the tokens that are drawn of each prompt."""
        return self.norms * min(1.0, self.drawn / (self.group_size * self.tokens))

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return FLOAT * (self.blocks + 2.0 * self.embedding)

    @property
    def own(self) -> int:
        """Prompts of a process, of the one with most."""
        return -(-self.prompts // self.processes)

    def signals(self, rows: int, rollouts: int) -> float:
        """Bytes of the backward signals of some rollouts' rows, at a block's output and at its input."""
        each = self.prompt_tokens + self.tokens - 1  # the last token is not read
        return 2.0 * FLOAT * self.width * rows * rollouts * each

    def activations(self, outer: float, inner: float, logits: float) -> float:
        """Bytes of one rollout: tensors as wide as the model and its feed-forward layers in each block, logits."""
        through = self.layers * (self.prompt_tokens + self.tokens) * (outer * self.width + inner * self.inner)
        return FLOAT * (through + logits * self.tokens * self.vocabulary)

    @property
    def norms_held(self) -> float:
        """Bytes beside the weights: activations, factors of the layers' inputs, and signals of some tokens."""
        length = self.prompt_tokens + self.tokens - 1
        narrow, wide = min(self.width, length), min(self.inner, length)
        block = length * (2 * self.inner + 8 * self.width) + narrow * max(self.inner, 3 * self.width)
        signals = max(1, min(2 * BLOCK, SIGNAL_BYTES // (2 * FLOAT * length * self.inner))) * block
        factors = self.layers * length * (3 * narrow + wide)
        return self.activations(10, 3, 3) + FLOAT * (factors + signals) + SCORE_BYTES + SLICE_BYTES

    @property
    def sketch_held(self) -> float:
        """Bytes beside the weights: the graph of a rollout with attention's products, and tangents of some directions.

        How many tensors there are was counted.
        """
        length = self.prompt_tokens + self.tokens
        products, moved = 1.1 * self.layers * self.heads * length**2, max(ROWS, length)
        return self.activations(60, 10, 3) + FLOAT * (products + moved * (19 * self.width + 2 * self.inner))

    @property
    def attribution_held(self) -> float:
        """Bytes beside the weights: three gradients, and the graph of a rollout with its tangents, as counted."""
        return 3 * self.weights + self.activations(9.5, 4, 8)

    @property
    def contrast_held(self) -> float:
        """Bytes beside the weights: copies, what AdamW holds of one, and the graph of a batch, as counted."""
        return 7.7 * self.weights + self.batch * self.activations(12, 5, 5)

    @property
    def one_round(self) -> Rounds:
        """All at once."""
        held = self.signals(self.rows, self.own * self.group_size)
        return Rounds(1, 1, self.rows * self.prompts / self.processes, held)

    def packed(self, free: float) -> Rounds:
        """As many rounds as free bytes of a process take: half of them hold the signals of a round."""
        if self.one_round.held <= free / 2:
            return self.one_round
        parts, rows, held = self.own, self.rows, self.signals(self.rows, self.group_size)
        if cut := held > free / 4:
            parts, rows, held = parts * self.group_size, self.rows_alone, self.signals(self.rows_alone, 1)
        fit = int(free / 4 // held)
        bins = -(-parts // fit)
        return Rounds(bins * (bins - 1) // 2, bins - 1, 2.0 * fit * rows, 2 * fit * held, cut)

    def sent(self, way: Rounds) -> float:
        """Bytes of gradients that one process sends to the others."""
        return way.rounds * way.rows * self.weights * (1 - 1 / self.processes)


def run(config: ScaleConfig) -> Report:
    """Print what every level of a measured step would take; nothing is run."""
    costs, every = Costs(**vars(config)), config.processes
    speed, link, weights = config.teraflops * 1e12, config.gigabytes * 1e9, costs.weights
    free, whole = 1e9 * config.memory - weights, costs.one_round
    ways = {"every estimator's gradient": whole, f"the same in {config.memory} GB": costs.packed(free)}
    fitted, scored = costs.contrast
    fit_by = (fitted + scored) / (fitted / min(every, 2) + scored / every)  # two fit, all score
    gradients = 2 * weights * (1 - 1 / every)  # of attribution, summed over processes
    drawn = f"norms of {config.drawn} drawn tokens of a prompt"
    levels = {  # operations, bytes held beside the weights, bytes sent, GPUs that work
        "a training step": (costs.training, None, None, every),
        "forward: proxies, entropy, the sampling check": (0.0, None, None, every),
        **{what: (costs.gram(way), way.held, costs.sent(way), every) for what, way in ways.items()},
        drawn: (costs.drawn_norms, costs.norms_held, 0.0, every),
        "norms of all tokens": (costs.norms, costs.norms_held, 0.0, every),
        f"sketched norms, {config.directions} directions": (costs.sketch, costs.sketch_held, 0.0, every),
        "attribution, split": (costs.attribution, costs.attribution_held, gradients, every),
        "contrast": (fitted + scored, costs.contrast_held, 0.0, fit_by),
    }
    rows = [
        {"what": what, "flops": flops, "ratio": flops / costs.training, "sent": sent}
        | {"held": None if held is None else weights + held}
        | {"seconds": flops / (speed * workers) + (sent or 0.0) / link}
        for what, (flops, held, sent, workers) in levels.items()
    ]
    model = f"{(costs.blocks + 2 * costs.embedding) / 1e9:.1f} billion parameters"
    step = f"{config.prompts} prompts × {config.group_size} rollouts of {config.tokens:,} tokens"
    title = f"On paper: {model}, {step}, {config.processes} GPUs"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, way=costs.packed(free)))
