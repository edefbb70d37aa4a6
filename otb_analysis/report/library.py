"""plotly.js inside a page, packed: plain, it would be nine tenths of a report; two fifths of it are left."""

import base64
import gzip
import json

from plotly.offline import get_plotlyjs

from otb_analysis.figures import CONFIG

UNPACK = """
addEventListener("DOMContentLoaded", async () => {
  const boxes = document.querySelectorAll(".plot");
  if (!window.DecompressionStream) {
    for (const box of boxes) box.textContent = "This browser cannot unpack the figures; one of 2023 or later can.";
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);
  for (const box of boxes) {
    const own = JSON.parse(box.nextElementSibling.textContent);
    Plotly.newPlot(box, own.data, own.layout, CONFIG);
  }
});
"""
"""Runs plotly.js from the element `plotly`, then draws into each box of class `plot` the figure that follows it."""


def packed_library() -> str:
    """Return the elements of a page's head that bring plotly.js, its licence in clear, and draw the page's figures."""
    code = get_plotlyjs()
    notice = code[: code.index("*/") + 2]
    packed = base64.b64encode(gzip.compress(code.encode(), mtime=0)).decode()
    unpack = UNPACK.replace("CONFIG", json.dumps(CONFIG))
    return f'<script id="plotly" type="text/plain">{packed}</script><script>{notice}{unpack}</script>'
