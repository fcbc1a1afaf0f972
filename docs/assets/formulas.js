// Typeset the formulas of a page with KaTeX, which is served with the site (assets/katex, version 0.19.1, MIT licence).
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim(); // \( ... \) or \[ ... \]
    katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: true });
  }
});
