"""Shares of ‖ḡ‖² at a step: prompts as bars of signal and noise, tokens as a curve of what the largest hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics import Holders, StepAttribution
from otb_analysis.figures.rollouts import distinct
from otb_analysis.figures.styles import BLUE, GREY, ORANGE, RULE, panels
from otb_analysis.figures.texts import visible
from otb_analysis.types import Float32

MOST_PROMPTS = 24
"""Prompts drawn; the others are one bar."""
MOST_POINTS = 2_000
"""Points of the curve of tokens: more than a screen has columns."""


@dataclass(frozen=True)
class AttributionInfo:
    """The numbers behind the picture of one step's attribution, as shares of ‖ḡ‖² or of another whole, which is 1."""

    step: int
    norm_sq: float
    prompt: tuple[str, ...]  # Name of each bar [K], largest |share| first
    signal: Float32  # Signal of each bar [K]; its whole share where the split was not measured
    noise: Float32 | None  # Noise of each bar [K], None without the split
    count: Float32  # Numbers of tokens, from 1 to all [n]; all of them where they are few
    # Share of ‖ḡ‖² that so many tokens hold [n]; passes 1 and comes back where tokens push against the update.
    held: Float32
    of: str = "‖ḡ‖²"


def attribution_info(attribution: StepAttribution, of: str = "‖ḡ‖²") -> AttributionInfo:
    """Collect bars and curve of one step; `of` names what the shares add up to."""
    whole, prompts = attribution.norm_sq or 1.0, attribution.prompts
    names = [str(g) for g in prompts.group[:MOST_PROMPTS]]
    if len(prompts) > MOST_PROMPTS:
        names.append(f"{len(prompts) - MOST_PROMPTS} others")
    starts = np.arange(len(names))  # of the bars; the last one goes on to the end
    parts = (prompts.share if prompts.signal is None else prompts.signal), prompts.noise
    signal, noise = (None if part is None else np.add.reduceat(part, starts) / whole for part in parts)
    held = np.cumsum(np.sort(attribution.tokens.share)[::-1]) / whole
    drawn = np.unique(np.linspace(0, len(held) - 1, MOST_POINTS).astype(int))
    return AttributionInfo(
        attribution.step, attribution.norm_sq, tuple(names), np.asarray(signal, np.float32),
        None if noise is None else noise.astype(np.float32), (drawn + 1).astype(np.float32),
        held[drawn].astype(np.float32), of,
    )  # fmt: skip


def plot_attribution(info: AttributionInfo) -> go.Figure:
    """Draw prompts on the left, tokens on the right."""
    share = f"share of {info.of}"
    titles = [("Prompts", f"{share}, largest first"), ("Tokens", f"{share} in the n tokens with most")]
    figure, (left, right) = panels(titles, 2, height=330, shared_x=False)
    text = f"prompt %{{x}}: <b>%{{text}}</b> of {info.of}<extra>"
    bars = [("share", info.signal, BLUE)]
    if info.noise is not None:
        bars = [("signal: along other prompts", info.signal, BLUE), ("noise: along its own", info.noise, ORANGE)]
    prompts = [prompt.replace(" ", "<br>") for prompt in info.prompt]
    for name, values, color in bars:
        figure.add_bar(
            x=prompts, y=values, name=name, marker={"color": color, "line": {"width": 0}},
            text=[f"{v:.1%}" for v in values], textposition="none",
            hovertemplate=text + name.split(":")[0] + "</extra>", **left,
        )  # fmt: skip
    figure.add_scatter(
        x=info.count, y=info.held, mode="lines", line={"color": GREY, "width": 2}, showlegend=False,
        hovertemplate="the %{x} largest hold <b>%{y:.0%}</b><extra></extra>", **right,
    )  # fmt: skip
    figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": RULE}, **right)
    figure.update_layout(barmode="relative", bargap=0.25, showlegend=len(bars) > 1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_xaxes(type="category", title_text="prompt", tickfont={"size": 11}, **left)
    return figure.update_xaxes(title_text="n tokens", **right)


def attribution_table(
    attribution: StepAttribution, holders: Holders, tokens: pd.DataFrame, rollouts: pd.DataFrame
) -> pd.DataFrame:
    """Return holders with what they are: prompt, rollout's reward, token's text; shares of ‖ḡ‖² as fractions.

    `tokens` are the step's rows with rollout, t, token; `rollouts` those with group, rollout, prompt, reward.
    """
    whole = attribution.norm_sq or 1.0
    table = pd.DataFrame({"prompt": holders.group})
    if holders.level != "prompt":
        table["rollout"] = holders.rollout
    if holders.level == "token":
        table["t"] = holders.t
        texts: Any = tokens.drop_duplicates(["rollout", "t"]).set_index(["rollout", "t"])["token"]
        held = texts.reindex(pd.MultiIndex.from_arrays([holders.rollout, holders.t])).fillna("")
        table["token"] = [visible(str(text)) for text in held]
    table["share"] = holders.share / whole
    if holders.signal is not None and holders.noise is not None:
        table["signal"], table["noise"] = holders.signal / whole, holders.noise / whole
    if holders.level != "token":
        table["tokens"] = holders.n_tokens
    key = "group" if holders.level == "prompt" else "rollout"
    rewards: Any = rollouts.groupby(key)["reward"].mean()
    table["reward"] = rewards.reindex(table["prompt" if key == "group" else "rollout"]).to_numpy(float)
    first = rollouts.drop_duplicates("group")
    labels = distinct(dict(zip(first["group"], first["prompt"].fillna("").astype(str), strict=True)))
    return table.assign(text=[labels.get(g, "") for g in holders.group])
