for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const numeric = head.dataset.kind === "number";
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what has no number stays last in both directions
        return sign * (numeric ? x - y : x.localeCompare(y));
      });
      body.append(...rows);
    });
  });
}

// Paper cannot be clicked: print everything, then put the page back as it was.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => (details.open = true));
});
addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
