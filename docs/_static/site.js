// Lets long names in the contents beside a page break after an underscore, a dot or a parenthesis.
document.addEventListener("DOMContentLoaded", () => {
  for (const name of document.querySelectorAll(".page-toc .pre, .page-toc a.nav-link")) {
    if (name.children.length) continue;
    const parts = name.textContent.split(/(?<=[A-Za-z0-9][_.(])(?=[A-Za-z])/);
    name.replaceChildren(...parts.flatMap((part) => [document.createElement("wbr"), part]).slice(1));
  }
});
