// Text into HTML: every value that a template names is escaped, unless it was made by a template.
class Html { constructor(source) { this.source = source; } }
function raw(value) {
  if (value instanceof Html) return value.source;
  if (Array.isArray(value)) return value.map(raw).join("");
  return String(value).replace(/[&<>"'`]/g, (c) => `&#${c.charCodeAt(0)};`);
}
function html(parts, ...values) {
  return new Html(parts.reduce((made, part, i) => made + raw(values[i - 1]) + part));
}
function put(element, made) {
  element.innerHTML = raw(made);
  for (const own of element.querySelectorAll("[data-colour]")) own.style.background = own.dataset.colour;
}
