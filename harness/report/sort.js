
// Sorts a table by the column whose heading is pressed, by mouse or keyboard: up, down, then as it was.
// Cells with a number in data-v sort by it; those without one come after, by their text.
"use strict";
const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

function compare(a, b, sign) {
  const [x, y] = [parseFloat(a.dataset.v), parseFloat(b.dataset.v)];
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  const order = Number.isNaN(x) ? a.textContent.localeCompare(b.textContent, "en", { numeric: true }) : x - y;
  return sign * order;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const before = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    if (!heading.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const wanted = NEXT[heading.getAttribute("aria-sort") ?? "none"];
      for (const other of headings) other.removeAttribute("aria-sort");
      const rows = [...before];
      if (wanted !== "none") {
        heading.setAttribute("aria-sort", wanted);
        const sign = wanted === "ascending" ? 1 : -1;
        rows.sort((one, other) => compare(one.cells[column], other.cells[column], sign));
      }
      body.append(...rows);
    });
  });
}

// A printed page has what is folded; a link into a fold opens it without a script.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((fold) => (fold.open = true)));
