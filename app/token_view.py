"""The clickable, coloured tokens: a component that only ever creates text nodes.

Token text is model output. It reaches the browser as JSON and the page through `textContent`; nothing of it is parsed
as HTML, Markdown or a template.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
from streamlit.components.v2 import component

from otb_analysis.figures import TokensInfo, number

CSS = """
:host { --line: var(--st-border-color, #DDE2E7); }
.wrap { font-family: var(--st-font, sans-serif); color: var(--st-text-color); font-size: 13px; position: relative; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; margin: 2px 0 12px; }
.legend .scale { display: flex; align-items: center; gap: 8px; font-variant-numeric: tabular-nums; }
.legend .bar { width: 180px; height: 10px; border-radius: 2px; border: 1px solid var(--line); }
.legend .item { display: flex; align-items: center; gap: 6px; opacity: .85; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 10px; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: 8px 10px 10px; min-width: 0; }
.head { display: flex; gap: 10px; align-items: baseline; margin-bottom: 6px; font-variant-numeric: tabular-nums; }
.head b { font-weight: 600; }
.head span { opacity: .75; }
.head .paid { margin-left: auto; font-weight: 600; opacity: 1; }
.text { font-family: var(--st-code-font, monospace); font-size: 13px; line-height: 1.85; direction: ltr;
  max-height: 21em; overflow: auto; }
.tok { display: inline-block; unicode-bidi: isolate; white-space: pre; padding: 0 2px; margin: 0 1px 1px 0;
  border: 1px solid transparent; border-radius: 3px; line-height: 1.45; cursor: pointer; max-width: 100%;
  overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.tok:hover, .tok:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: 0; }
.tok.chosen { outline: 2px solid var(--st-text-color); }
.missing { background: repeating-linear-gradient(45deg, rgba(125,130,140,.28) 0 3px, rgba(125,130,140,.06) 3px 6px); }
.tool { font-style: italic; opacity: .7; border: 1px dashed currentColor; background: none; }
.swatch { display: inline-block; width: 18px; height: 12px; border-radius: 2px; box-sizing: border-box; }
.tip { position: fixed; z-index: 99999; pointer-events: none; display: none; padding: 7px 9px; border-radius: 5px;
  background: #14181D; color: #F4F6F8; font: 12px/1.5 var(--st-font, sans-serif); box-shadow: 0 3px 14px rgba(0,0,0,.3);
  grid-template-columns: auto auto; gap: 0 12px; font-variant-numeric: tabular-nums; max-width: 340px; }
.tip .v { text-align: right; }
.tip .on { color: #F6C9A8; }
"""

JS = """
function element(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}
function legend(data) {
  const row = element("div", "legend");
  const scale = element("div", "scale");
  const bar = element("div", "bar");
  bar.style.background = `linear-gradient(to right, ${data.colors.join(",")})`;
  scale.append(element("b", "", data.column), element("span", "", data.low), bar, element("span", "", data.high));
  row.append(scale);
  for (const [kind, label] of data.marks) {
    const item = element("div", "item");
    item.append(element("span", "swatch " + kind), element("span", "", label));
    row.append(item);
  }
  return row;
}
export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  const old = parentElement.querySelector(".wrap");
  if (old) old.remove();
  const wrap = element("div", "wrap");
  const tip = element("div", "tip");
  const show = (event, values) => {
    tip.replaceChildren();
    data.columns.forEach((name, i) => {
      if (values[i] === "") return;
      const mark = name === data.column ? " on" : "";
      tip.append(element("span", "k" + mark, name), element("span", "v" + mark, values[i]));
    });
    tip.style.display = "grid";
    const box = tip.getBoundingClientRect();
    const at = event.target.getBoundingClientRect();
    const below = at.bottom + 6 + box.height < window.innerHeight;
    tip.style.left = Math.max(4, Math.min(at.left, window.innerWidth - box.width - 8)) + "px";
    tip.style.top = (below ? at.bottom + 6 : Math.max(4, at.top - box.height - 6)) + "px";
  };
  const hide = () => { tip.style.display = "none"; };
  const cards = element("div", "cards");
  for (const row of data.rows) {
    const card = element("div", "card");
    const head = element("div", "head");
    const count = row.length + (row.length === 1 ? " token" : " tokens");
    head.append(element("b", "", "rollout " + row.rollout), element("span", "", count));
    if (row.finish) head.append(element("span", "", row.finish));
    head.append(element("span", "paid", "reward " + row.reward));
    const text = element("div", "text");
    for (const [t, content, breaks, kind, color, ink, values] of row.tokens) {
      const token = element("span", "tok " + kind, content);
      if (color) { token.style.background = color; token.style.color = ink; }
      token.tabIndex = 0;
      if (data.chosen && data.chosen[0] === row.rollout && data.chosen[1] === t) token.classList.add("chosen");
      token.onmouseenter = (event) => show(event, values);
      token.onfocus = (event) => show(event, values);
      token.onmouseleave = hide;
      token.onblur = hide;
      token.onclick = () => setTriggerValue("token", [row.rollout, t]);
      token.onkeydown = (event) => { if (event.key === "Enter") token.onclick(); };
      text.append(token);
      if (breaks) text.append(document.createElement("br"));
    }
    card.append(head, text);
    cards.append(card);
  }
  wrap.append(legend(data), cards, tip);
  parentElement.append(wrap);
  return hide;
}
"""

_component = component("otb_analysis.tokens", css=CSS, js=JS)


def token_view(
    info: TokensInfo,
    tokens: pd.DataFrame,
    finish: Mapping[int, object],
    columns: Sequence[str],
    chosen: tuple[int, int] | None,
) -> tuple[int, int] | None:
    """Show all rollouts of one prompt; return (rollout, t) of a token that was just clicked.

    Args:
        finish: Finish reason by rollout.
    """
    result = _component(
        data=_payload(info, tokens, finish, columns, chosen), key="token_view", on_token_change=lambda: None
    )
    clicked = getattr(result, "token", None)
    return (int(clicked[0]), int(clicked[1])) if clicked else None


def _payload(
    info: TokensInfo,
    tokens: pd.DataFrame,
    finish: Mapping[int, object],
    columns: Sequence[str],
    chosen: tuple[int, int] | None,
) -> dict[str, object]:
    texts = [[number(v) if v == v else "" for v in tokens[c].astype(float)] for c in columns]
    values = dict(zip(zip(tokens["rollout"], tokens["t"], strict=True), zip(*texts, strict=True), strict=True))
    rows = [
        {
            "rollout": row.rollout,
            "reward": number(row.reward),
            "length": row.length,
            "finish": str(finish.get(row.rollout) or ""),
            "tokens": [
                [t.t, t.text, t.breaks, _kind(t.tool, t.color), t.color, t.ink, values[row.rollout, t.t]]
                for t in row.tokens
            ],
        }
        for row in info.rollouts
    ]
    return {
        "rows": rows,
        "column": info.column,
        "columns": list(columns),
        "colors": list(info.scale.colors),
        "low": ("≤ " if info.n_below else "") + number(info.scale.low),
        "high": ("≥ " if info.n_above else "") + number(info.scale.high) + (" (log)" if info.scale.log else ""),
        "marks": _marks(info),
        "chosen": list(chosen) if chosen else None,
    }


def _kind(tool: bool, color: str | None) -> str:
    if tool:
        return "tool"
    return "missing" if color is None else ""


def _marks(info: TokensInfo) -> list[tuple[str, str]]:
    tools = any(t.tool for row in info.rollouts for t in row.tokens)
    marks = [("missing", f"not measured ({info.n_missing:,})")] if info.n_missing else []
    return marks + ([("tool", "tool output, not sampled by the policy")] if tools else [])
