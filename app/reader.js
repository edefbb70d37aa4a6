// Rollouts as a list beside the text of one, chosen by mouse and by keys. Only text nodes are made: texts are model output.
function element(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}
function written(parent, pieces, colors) {
  for (const [kind, text, level, t] of pieces) {
    const piece = kind === "match" ? element("mark", "", text) : element("span", kind, text);
    if (level >= 0 && kind !== "match") [piece.style.background, piece.style.color] = colors[level];
    if (t != null) [piece.className, piece.t] = [`${piece.className} tok`, t];
    parent.append(piece);
  }
  return parent;
}
function list(wrap, data) {
  const table = element("table");
  const head = element("tr");
  for (const title of data.columns) head.append(element("th", "", title));
  const names = element("thead");
  names.append(head);
  table.append(names);
  wrap.rows = data.rows.map((row, at) => {
    const body = element("tbody");
    const [facts, line] = [element("tr"), element("tr")];
    for (const cell of row.cells) facts.append(element("td", "", cell));
    const text = written(element("td", "line"), row.line);
    text.colSpan = data.columns.length;
    line.append(text);
    body.append(facts, line);
    body.onclick = () => choose(wrap, at);
    table.append(body);
    return body;
  });
  return table;
}
function mark(wrap, at) {
  wrap.rows[wrap.at]?.classList.remove("chosen");
  wrap.at = at;
  const row = wrap.rows[at];
  if (!row) return;
  row.classList.add("chosen");
  const [pane, head] = [wrap.list, wrap.list.querySelector("thead").offsetHeight];
  const [top, bottom] = [row.offsetTop - head, row.offsetTop + row.offsetHeight - pane.clientHeight];
  pane.scrollTop = Math.max(bottom, Math.min(top, pane.scrollTop)); // the page itself does not move
}
function choose(wrap, at) {
  mark(wrap, at);
  clearTimeout(wrap.timer);
  wrap.timer = setTimeout(() => {
    wrap.timer = null;
    wrap.send("rollout", wrap.data.rows[at].id);
  }, 120);
}
const MOVES = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
function pressed(wrap, event) {
  const move = MOVES[event.key];
  if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  event.stopPropagation();
  const at = Math.max(0, Math.min(wrap.rows.length - 1, (wrap.at ?? -1) + move));
  if (at !== wrap.at) choose(wrap, at);
}
function text(wrap, shown) {
  const pane = element("div", "text");
  const prompt = element("div", "part");
  prompt.append(element("b", "", "Prompt"));
  prompt.append(written(element("div", "prose"), shown.prompt));
  if (shown.head.length) {
    const fold = element("details");
    fold.append(element("summary", "", shown.folded), written(element("div", "prose"), shown.head));
    prompt.append(fold);
  }
  const answer = element("div", "part");
  answer.append(element("b", "", "Answer"));
  const turns = new Set(shown.passages.map(([turn]) => turn)).size > 1;
  shown.passages.forEach(([turn, tool, pieces], i) => {
    if (turns && turn !== shown.passages[i - 1]?.[0]) answer.append(element("div", "turn", "turn " + (turn + 1)));
    const box = element("div", "prose" + (tool ? " tool" : ""));
    if (tool) box.append(element("i", "", "not written by the policy"));
    answer.append(written(box, pieces.length ? pieces : [["special", "empty"]], shown.palette));
  });
  // Whoever draws the mouse over a text or clicks a word twice selects it.
  answer.onpointerdown = ({ clientX, clientY }) => (wrap.down = [clientX, clientY]);
  answer.ondblclick = () => clearTimeout(wrap.click);
  answer.onclick = ({ target: { t }, clientX, clientY, detail }) => {
    clearTimeout(wrap.click);
    const [x, y] = wrap.down ?? [clientX, clientY]; // a screen reader clicks without a pointer
    if (t == null || detail > 1 || Math.hypot(clientX - x, clientY - y) > 3) return;
    wrap.click = setTimeout(() => wrap.send("token", [...shown.of, t]), 250);
  };
  if (shown.sizes.length) {
    const [title, low, high] = shown.sizes, bar = element("span", "bar"), last = shown.palette.length - 1;
    const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => shown.palette[Math.round(at * last)][0]);
    bar.style.background = `linear-gradient(to right, ${stops.join(",")})`;
    answer.firstChild.after(element("span", "scale", `${title} ${low} `), bar, element("span", "scale", ` ${high} · a click opens Tokens`));
  }
  const facts = element("div", "facts");
  for (const fact of shown.facts) facts.append(element("span", "", fact));
  pane.append(facts, prompt, answer);
  wrap.text.replaceChildren(pane);
  const match = pane.querySelector("mark");
  wrap.text.scrollTop = match ? match.offsetTop - wrap.text.clientHeight / 3 : 0;
}
export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let wrap = parentElement.querySelector(".wrap");
  if (!wrap) {
    wrap = element("div", "wrap");
    wrap.tabIndex = -1;
    wrap.list = element("div", "list");
    wrap.text = element("div", "pane");
    wrap.list.tabIndex = wrap.text.tabIndex = 0; // what scrolls is reached by Tab
    for (const part of [wrap.list, wrap.text]) part.setAttribute("role", "region");
    wrap.list.setAttribute("aria-label", "Rollouts: j, k and arrow keys choose one");
    wrap.text.setAttribute("aria-label", "The chosen rollout");
    wrap.onkeydown = (event) => pressed(wrap, event);
    wrap.append(wrap.list, wrap.text);
    parentElement.append(wrap);
  }
  wrap.send = setTriggerValue;
  wrap.data = data;
  if (wrap.version !== data.version) {
    wrap.version = data.version;
    wrap.at = undefined;
    wrap.list.replaceChildren(list(wrap, data));
    wrap.list.scrollTop = 0;
    if (document.activeElement === document.body) wrap.focus({ preventScroll: true }); // keys work at once
  }
  if (wrap.timer) return; // a newer choice is on its way
  mark(wrap, data.rows.findIndex((row) => row.id === data.chosen));
  const shown = JSON.stringify(data.shown);
  if (wrap.shown !== shown) {
    wrap.shown = shown;
    text(wrap, data.shown);
  }
}
