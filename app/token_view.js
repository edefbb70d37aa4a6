// Rollouts as text whose tokens can be chosen by mouse and by keys. Only text nodes are made: tokens are model output.
function element(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}
function written(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  const digits = { minimumSignificantDigits: size === 0 ? 1 : 3, maximumSignificantDigits: 3 };
  return value.toLocaleString("en", digits).replace("-", "−");
}
function legend(data) {
  const row = element("div", "legend");
  const scale = element("div", "scale");
  const bar = element("div", "bar");
  bar.style.background = `linear-gradient(to right, ${data.colors.join(",")})`;
  scale.append(element("b", "", data.title), element("span", "", data.low), bar, element("span", "", data.high));
  row.append(scale);
  for (const [kind, label] of data.marks) {
    const item = element("div", "item");
    item.append(element("span", "swatch " + kind), element("span", "", label));
    row.append(item);
  }
  row.append(element("span", "keys", "← → token · n p large token · ↑ ↓ rollout · Shift + ← → step"));
  return row;
}
function head(row) {
  const line = element("div", "head");
  line.append(element("b", "", "rollout " + row.rollout));
  for (const fact of row.facts) line.append(element("span", "", fact));
  if (row.warning) line.append(element("span", "warning", row.warning));
  line.append(element("span", "paid", "reward " + row.reward));
  if (row.parts) line.append(element("span", "parts", row.parts));
  return line;
}
// How far a token's colour is from the quiet end of the scale, or from its middle: 0 to 1, and −1 where it has none.
function apart(level, data) {
  if (level < 0) return -1;
  return Math.abs(level / (data.palette.length - 1) - data.quiet) / Math.max(data.quiet, 1 - data.quiet);
}
const BINS = 240, LARGE = 0.02, LONG = 120;
// A rollout by position, each bin in the colour of its token that stands out most; a click leads there.
function map(row, pane, place, data) {
  const n = row.levels.length, bins = Math.min(BINS, n), strip = element("div", "map");
  const loudest = Array.from({ length: bins }, (_, bin) => {
    let best = Math.floor((bin * n) / bins);
    for (let i = best; i < Math.floor(((bin + 1) * n) / bins); i++)
      if (apart(row.levels[i], data) > apart(row.levels[best], data)) best = i;
    return best;
  });
  const stops = loudest.flatMap((i, bin) => {
    const color = row.levels[i] < 0 ? "transparent" : data.palette[row.levels[i]][0];
    return [`${color} ${(100 * bin) / bins}%`, `${color} ${(100 * (bin + 1)) / bins}%`];
  });
  strip.style.background = `linear-gradient(to right, ${stops.join(",")})`;
  strip.title = "where its tokens stand out: click to go there";
  strip.place = (share) => [pane, place, loudest[Math.min(bins - 1, Math.max(0, Math.floor(share * bins)))]];
  return strip;
}
// The largest fiftieth of a rollout's tokens, five at least, in their order.
function large(row, data) {
  const size = row.levels.map((level) => apart(level, data));
  const order = size.map((_, i) => i).filter((i) => size[i] > 0).sort((a, b) => size[b] - size[a] || a - b);
  return order.slice(0, Math.max(5, Math.ceil(LARGE * size.length))).sort((a, b) => a - b);
}
// The next large token, or the one before, in this rollout or the nearest one that has any.
function leap([pane, place, i], way, data) {
  const rows = data.panes[pane].rows;
  for (let p = place; p >= 0 && p < rows.length; p += way) {
    const after = large(rows[p], data).filter((k) => p !== place || (way > 0 ? k > i : k < i));
    if (after.length) return [pane, p, after.at(way > 0 ? 0 : -1)];
  }
  return null;
}
// How many tokens are drawn at once: of all cards to begin with, and before and after the place that is read in one;
// there more of short ones, so that the box is full.
const FEW = 4000, PART = 400, LETTERS = 6;
// A card draws the part of its rollout that is looked at; one that came without texts is its map alone.
function card(row, pane, place, data, drawn) {
  const box = element("div", "card"), text = element("div", "text"), short = !row.texts;
  box.append(head(row), ...(short || row.levels.length > LONG ? [map(row, pane, place, data)] : []));
  if (short) {
    box.append(element("div", "rest", "its map alone: click where to read"));
    return { box };
  }
  const n = row.texts.length, letters = row.texts.join("").length || 1;
  const part = Math.max(PART, Math.ceil((PART * LETTERS * n) / letters));
  const turns = new Set(row.turns).size > 1;
  text.style.minHeight = Math.min(20, 1.7 * Math.ceil(n / 20)) + "em"; // until it is drawn
  box.append(text);
  const own = { box, text, from: 0, to: 0, spans: [] };
  const token = (i) => {
    const kind = row.kinds[i], level = row.levels[i];
    const span = element("span", "tok " + kind + (level < 0 && kind !== "tool" ? " missing" : ""), row.texts[i]);
    if (level >= 0) [span.style.background, span.style.color] = data.palette[level];
    span.at = [pane, place, i];
    return span;
  };
  own.draw = (middle) => {
    [own.from, own.to] = n <= 2 * part ? [0, n] : [Math.max(0, middle - part), Math.min(n, middle + part)];
    own.spans = [];
    text.style.minHeight = "";
    text.replaceChildren();
    const rest = (many, where) => {
      if (many) text.append(element("div", "rest", `${many.toLocaleString("en")} tokens ${where}: scroll on`));
    };
    rest(own.from, "before");
    let into = text;
    for (let i = own.from; i < own.to; i++) {
      if (turns && (i === own.from || row.turns[i] !== row.turns[i - 1])) {
        into = text;
        text.append(element("div", "turn", "turn " + (row.turns[i] + 1)));
      }
      if (row.kinds[i] !== "tool") into = text;
      else if (into === text) {
        into = element("span", "span");
        into.append(element("i", "", "not the policy's"));
        text.append(into);
      }
      own.spans.push(token(i));
      into.append(own.spans.at(-1));
      if (row.breaks[i]) into.append(document.createElement("br"));
    }
    rest(n - own.to, "after");
    drawn(own);
  };
  own.span = (i) => {
    if (i < own.from || i >= own.to) own.draw(i);
    return own.spans[i - own.from];
  };
  text.onscroll = () => { // the token at the end stays where it is while others come beyond it
    const near = text.clientHeight / 2, below = text.scrollHeight - text.clientHeight - text.scrollTop < near;
    const i = below && own.to < n ? own.to - 1 : text.scrollTop < near && own.from > 0 ? own.from : -1;
    if (i < 0) return;
    const top = own.span(i).getBoundingClientRect().top;
    own.draw(i);
    text.scrollTop += own.span(i).getBoundingClientRect().top - top;
  };
  return own;
}
function build(wrap, data) {
  const state = { at: null, chosen: null, timer: null };
  const tip = element("div", "tip");
  const panes = element("div", "panes" + (data.panes.length > 1 ? " two" : data.wide ? " wide" : ""));
  const outline = (own) => {
    if (!state.at || cards[state.at[0]][state.at[1]] !== own) return;
    state.chosen?.classList.remove("chosen");
    state.chosen = own.spans[state.at[2] - own.from] ?? null;
    state.chosen?.classList.add("chosen");
  };
  const cards = data.panes.map((pane, p) => pane.rows.map((row, place) => card(row, p, place, data, outline)));
  data.panes.forEach((pane, p) => {
    const box = element("div", "pane"), all = element("div", "cards");
    if (pane.title) box.append(element("b", "", pane.title));
    all.append(...cards[p].map((own) => own.box));
    box.append(all);
    panes.append(box);
  });
  wrap.replaceChildren(legend(data), panes, tip);
  wrap.near?.disconnect();
  wrap.near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      wrap.near.unobserve(target);
      if (!target.own.to) target.own.draw(0);
    }
  }, { rootMargin: "600px", scrollMargin: "600px" });
  let few = FEW;
  for (const own of cards.flat().filter((one) => one.draw)) {
    own.box.own = own;
    if (few > 0) own.draw(0);
    else wrap.near.observe(own.box);
    few -= own.to;
  }
  const hide = () => { tip.style.display = "none"; };
  const show = (token) => {
    const [p, place, i] = token.at;
    const values = data.panes[p].rows[place].values;
    tip.replaceChildren();
    data.columns.forEach(([name, title]) => {
      const value = values[name][i];
      if (value === null) return;
      const mark = name === data.column ? " on" : "";
      tip.append(element("span", "k" + mark, title), element("span", "v" + mark, written(value)));
    });
    tip.style.display = tip.childElementCount ? "grid" : "none";
    const box = tip.getBoundingClientRect();
    const at = token.getBoundingClientRect();
    const below = at.bottom + 6 + box.height < window.innerHeight;
    tip.style.left = Math.max(4, Math.min(at.left, window.innerWidth - box.width - 8)) + "px";
    tip.style.top = (below ? at.bottom + 6 : Math.max(4, at.top - box.height - 6)) + "px";
  };
  const place_of = (chosen) => {
    const rows = chosen && data.panes[chosen[0]] ? data.panes[chosen[0]].rows : [];
    const place = rows.findIndex((row) => row.rollout === chosen[1]);
    const i = place < 0 ? -1 : rows[place].ts.indexOf(chosen[2]);
    return i < 0 ? null : [chosen[0], place, i];
  };
  const mark = (at) => {
    state.chosen?.classList.remove("chosen");
    [state.at, state.chosen] = [at, null];
    const own = at && cards[at[0]][at[1]];
    if (!own?.draw) return;
    own.span(at[2]);
    outline(own);
  };
  const choose = (at) => {
    mark(at);
    (state.chosen ?? cards[at[0]][at[1]].box).scrollIntoView({ block: "nearest" });
    clearTimeout(state.timer);
    const row = data.panes[at[0]].rows[at[1]];
    state.timer = setTimeout(() => {
      state.timer = null;
      post(wrap, "token", [at[0], row.rollout, row.ts[at[2]]]);
    }, 120);
  };
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  wrap.onkeydown = (event) => {
    const move = moves[event.key], way = { n: 1, p: -1 }[event.key];
    if (!(move || way) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    hide();
    if (way) {
      const next = leap(state.at ?? [0, 0, way > 0 ? -1 : Infinity], way, data);
      if (next) choose(next);
      return;
    }
    if (event.shiftKey) {
      if (move[1]) post(wrap, "step", [move[1], performance.now()]); // two presses in a row are two changes
      return;
    }
    if (!state.at) return choose([0, 0, 0]);
    const [p, place, i] = state.at, rows = data.panes[p].rows;
    const next = Math.max(0, Math.min(rows.length - 1, place + move[0]));
    const to = Math.floor((i * (rows[place].width ?? 1)) / (rows[next].width ?? 1)) + move[1]; // of tokens, or of cells
    choose([p, next, Math.max(0, Math.min(rows[next].ts.length - 1, to))]);
  };
  const token_of = (event) => event.target.at ? event.target : null;
  panes.onmouseover = (event) => { const token = token_of(event); if (token) show(token); else hide(); };
  panes.onmouseleave = hide;
  panes.onclick = (event) => {
    const token = token_of(event), strip = event.target.place;
    if (!token && !strip) return;
    wrap.focus({ preventScroll: true });
    const box = event.target.getBoundingClientRect();
    choose(token ? token.at : strip((event.clientX - box.left) / box.width));
  };
  wrap.select = (chosen) => {
    if (state.timer) return; // a newer choice is on its way
    const at = place_of(chosen);
    if (at && String(state.at) === String(at)) return;
    mark(at);
    if (!state.chosen) return;
    if (document.activeElement === document.body) wrap.focus({ preventScroll: true }); // keys work at once
    const [token, box] = [state.chosen, state.chosen.closest(".text")];
    requestAnimationFrame(() => {
      box.scrollTop += token.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
      token.scrollIntoView({ block: "nearest" }); // the page, above the panel at its end
    });
  };
}
// What is sent while a page is being redrawn for another step carries the old step with it, and would undo the change:
// it waits until the new tokens are there.
const REDRAWN = 50, GIVEN_UP = 4000;
function post(wrap, name, value) {
  if (wrap.busy) { wrap.waiting = { ...wrap.waiting, [name]: value }; return; }
  if (name === "step") {
    wrap.busy = true;
    wrap.timer = setTimeout(() => release(wrap), GIVEN_UP); // there may be no further step
  }
  wrap.send(name, value);
}
function release(wrap) {
  clearTimeout(wrap.timer);
  wrap.busy = false;
  const waiting = wrap.waiting || {};
  wrap.waiting = null;
  for (const [name, value] of Object.entries(waiting)) post(wrap, name, value);
}
export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let wrap = parentElement.querySelector(".wrap");
  if (!wrap) {
    wrap = element("div", "wrap");
    wrap.tabIndex = 0;
    wrap.setAttribute("aria-label", "Tokens: arrow keys choose one");
    parentElement.append(wrap);
  }
  wrap.send = setTriggerValue;
  if (wrap.version !== data.version) {
    wrap.version = data.version;
    build(wrap, data);
    if (wrap.busy) {
      clearTimeout(wrap.timer);
      wrap.timer = setTimeout(() => release(wrap), REDRAWN);
    }
  }
  wrap.select(data.chosen);
}
