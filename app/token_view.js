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
function card(row, pane, place, data, tokens) {
  const box = element("div", "card");
  const text = element("div", "text");
  const turns = new Set(row.turns).size > 1;
  let into = text;
  const own = row.texts.map((content, i) => {
    if (turns && row.turns[i] !== row.turns[i - 1]) {
      into = text;
      text.append(element("div", "turn", "turn " + (row.turns[i] + 1)));
    }
    const kind = row.kinds[i];
    if (kind !== "tool") into = text;
    else if (into === text) {
      into = element("span", "span");
      into.append(element("i", "", "tool"));
      text.append(into);
    }
    const level = row.levels[i];
    const token = element("span", "tok " + kind + (level < 0 && kind !== "tool" ? " missing" : ""), content);
    if (level >= 0) [token.style.background, token.style.color] = data.palette[level];
    token.at = [pane, place, i];
    into.append(token);
    if (row.breaks[i]) into.append(document.createElement("br"));
    return token;
  });
  tokens[pane].push(own);
  box.append(head(row), ...(row.levels.length > LONG ? [map(row, pane, place, data)] : []), text);
  return box;
}
function build(wrap, data) {
  const tokens = data.panes.map(() => []);
  const tip = element("div", "tip");
  const panes = element("div", "panes" + (data.panes.length > 1 ? " two" : data.wide ? " wide" : ""));
  data.panes.forEach((pane, p) => {
    const box = element("div", "pane");
    const cards = element("div", "cards");
    if (pane.title) box.append(element("b", "", pane.title));
    pane.rows.forEach((row, place) => cards.append(card(row, p, place, data, tokens)));
    box.append(cards);
    panes.append(box);
  });
  wrap.replaceChildren(legend(data), panes, tip);
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
  const state = { chosen: null, timer: null };
  const place_of = (chosen) => {
    const rows = chosen && data.panes[chosen[0]] ? data.panes[chosen[0]].rows : [];
    const place = rows.findIndex((row) => row.rollout === chosen[1]);
    const i = place < 0 ? -1 : rows[place].ts.indexOf(chosen[2]);
    return i < 0 ? null : [chosen[0], place, i];
  };
  const mark = (at, scroll) => {
    if (state.chosen) state.chosen.classList.remove("chosen");
    state.chosen = at ? tokens[at[0]][at[1]][at[2]] : null;
    if (!state.chosen) return;
    state.chosen.classList.add("chosen");
    if (scroll) state.chosen.scrollIntoView({ block: "nearest" });
  };
  const choose = (at) => {
    mark(at, true);
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
      const next = leap(state.chosen ? state.chosen.at : [0, 0, way > 0 ? -1 : Infinity], way, data);
      if (next) choose(next);
      return;
    }
    if (event.shiftKey) {
      if (move[1]) post(wrap, "step", [move[1], performance.now()]); // two presses in a row are two changes
      return;
    }
    if (!state.chosen) return choose([0, 0, 0]);
    const [p, place, i] = state.chosen.at;
    const rows = tokens[p];
    const next = Math.max(0, Math.min(rows.length - 1, place + move[0]));
    choose([p, next, Math.max(0, Math.min(rows[next].length - 1, i + move[1]))]);
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
    if (at && state.chosen === tokens[at[0]][at[1]][at[2]]) return;
    mark(at, false);
    if (!at) return;
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
