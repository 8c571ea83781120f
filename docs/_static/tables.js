// On a phone, stacks the rows of tables that are too wide: each cell below its column's name.
// A table of one row, such as the start page's figures, is always stacked. On a desk, makes
// tables that are too wide dense.
(() => {
  const phone = matchMedia("(max-width: 46em)"); // as in towers.css
  const tables = [...document.querySelectorAll("article table.docutils")];
  for (const table of tables) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, place) => {
        cell.dataset.column = names[place] ?? "";
        cell.classList.toggle("blank", !cell.textContent.trim());
      });
  }
  const partEnd = /(?<=[(_.,=/])|(?<=[a-z])(?=[A-Z])/;
  for (const code of document.querySelectorAll("article table.docutils code .pre")) {
    const parts = code.textContent.split(partEnd);
    code.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }
  const layOut = () => {
    for (const table of tables) {
      table.classList.remove("dense", "stacked", "one-row");
      const { scrollWidth, clientWidth } = table.parentElement;
      const oneRow = table.tBodies[0].rows.length === 1;
      const tooWide = scrollWidth > clientWidth;
      table.classList.toggle("dense", !phone.matches && tooWide);
      const stacked = phone.matches && (oneRow || tooWide);
      table.classList.toggle("stacked", stacked);
      table.classList.toggle("one-row", stacked && oneRow);
    }
  };
  // Diagrams of text do not wrap: they are as small as they must be.
  const isDiagram = ({ textContent }) => /[│─▶▼]|^ +\|$/m.test(textContent);
  const diagrams = [...document.querySelectorAll("article pre")].filter(isDiagram);
  const fit = () => {
    for (const { style } of diagrams) [style.fontSize, style.whiteSpace] = ["", "pre"];
    for (const pre of diagrams) {
      const { paddingLeft, paddingRight, fontSize } = getComputedStyle(pre);
      const padding = parseFloat(paddingLeft) + parseFloat(paddingRight);
      const share = (pre.clientWidth - padding) / (pre.scrollWidth - padding);
      if (share < 1) pre.style.fontSize = `${Math.floor(parseFloat(fontSize) * share * 20) / 20}px`;
    }
  };
  layOut();
  fit();
  addEventListener("resize", () => (layOut(), fit()));
})();
