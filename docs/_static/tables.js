// On a phone, stacks the rows of tables that are too wide: each cell below its column's name.
(() => {
  const phone = matchMedia("(max-width: 46em)"); // as in towers.css
  const tables = [...document.querySelectorAll("article table.docutils")];
  for (const table of tables) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, place) => (cell.dataset.column = names[place] ?? ""));
  }
  const layOut = () => {
    for (const table of tables) {
      table.classList.remove("stacked");
      const { scrollWidth, clientWidth } = table.parentElement;
      table.classList.toggle("stacked", phone.matches && scrollWidth > clientWidth);
    }
  };
  layOut();
  addEventListener("resize", layOut);
})();
