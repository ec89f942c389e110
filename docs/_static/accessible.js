// What Furo and Sphinx leave out for readers with a keyboard or a screen reader; tests/docs/test_site.py runs axe.
document.addEventListener("DOMContentLoaded", () => {
  const set = (selector, name, value) =>
    document.querySelectorAll(selector).forEach((found) => found.setAttribute(name, value));
  set(".sidebar-drawer", "aria-label", "All pages");
  set(".toc-drawer", "aria-label", "On this page");
  set(".caption[role=heading]", "aria-level", "2");
  set(".highlight pre, .table-wrapper", "tabindex", "0"); // they scroll
  document.querySelectorAll("th").forEach((cell) => cell.textContent.trim() || cell.setAttribute("role", "cell"));
});
