// What the server cannot know or do: how wide the window is, what a screen reader is told of a figure, which is one
// picture with its sentence and one stop of Tab, and what belongs to one click.

// One click is one entry of the history, and one Back undoes it. A click that opens a page changes the address once for
// the page and once for each box of it, and Streamlit makes an entry of each, or of none where it is a box that was
// changed: the first change of a click is the entry, those that follow replace it. On the way back to another page
// Streamlit drops what boxes of both pages are bound to, such as the run: the address of the entry is asked for once
// more, when they are boxes of the page that is shown.
function keepHistory() {
  if (history.kept) return;
  const push = history.pushState.bind(history), replace = history.replaceState.bind(history), never = () => false;
  // Before the first click: the page that a running run opens by itself is an entry, the boxes of a new page are none.
  let begins = (url) => new URL(url, location).pathname !== location.pathname;
  let page = location.pathname, wanted = "";
  history.kept = true;
  history.pushState = (state, title, url) => {
    const first = begins(url);
    (first ? push : replace)(state, title, url);
    if (first) begins = never;
    page = location.pathname;
  };
  history.replaceState = (state, title, url) => {
    const entry = wanted;
    wanted = "";
    if (new URL(url, location).href === location.href) replace(state, title, url);
    else history.pushState(state, title, url);
    if (!entry || location.href === entry) return;
    setTimeout(() => {
      replace(state, title, entry);
      dispatchEvent(new PopStateEvent("popstate"));
    });
  };
  addEventListener("popstate", () => {
    begins = never;
    wanted = location.pathname === page ? "" : location.href;
    page = location.pathname;
  });
  for (const gesture of ["pointerdown", "keydown"]) {
    addEventListener(gesture, () => ((begins = () => true), (wanted = "")), true);
  }
}

function describe() {
  for (const chart of document.querySelectorAll("[data-testid=stPlotlyChart][aria-label]")) {
    const picture = chart.querySelector(".main-svg"), says = chart.getAttribute("aria-label");
    if (!picture || picture.getAttribute("aria-label") === says) continue;
    for (const [name, value] of Object.entries({ role: "img", tabindex: 0, "aria-label": says })) {
      picture.setAttribute(name, value);
    }
  }
  // The small curves of numbers are decoration without a name.
  for (const mark of document.querySelectorAll("[role=graphics-symbol]")) mark.setAttribute("aria-hidden", "true");
  for (const button of document.querySelectorAll(".modebar-btn:not([tabindex])")) button.tabIndex = -1;
  // What scrolls is reached by Tab, so that keys can scroll it.
  for (const box of document.querySelectorAll("[data-testid=stMarkdownContainer] > table, [data-testid=stTable] *")) {
    if (box.scrollWidth > box.clientWidth && /auto|scroll/.test(getComputedStyle(box).overflowX)) box.tabIndex = 0;
  }
}

export default function ({ setStateValue }) {
  const narrow = matchMedia("(max-width: 600px)");
  const tell = () => setStateValue("narrow", narrow.matches);
  const watch = new MutationObserver(describe);
  watch.observe(document.body, { childList: true, subtree: true });
  narrow.addEventListener("change", tell);
  keepHistory();
  describe();
  if (narrow.matches) tell();
  return () => {
    watch.disconnect();
    narrow.removeEventListener("change", tell);
  };
}
