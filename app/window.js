// What the server cannot know or do: how wide the window is, and what a screen reader is told of a figure, which is one
// picture with its sentence and one stop of Tab.
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
}

export default function ({ setStateValue }) {
  const narrow = matchMedia("(max-width: 600px)");
  const tell = () => setStateValue("narrow", narrow.matches);
  const watch = new MutationObserver(describe);
  watch.observe(document.body, { childList: true, subtree: true });
  narrow.addEventListener("change", tell);
  describe();
  if (narrow.matches) tell();
  return () => {
    watch.disconnect();
    narrow.removeEventListener("change", tell);
  };
}
