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
