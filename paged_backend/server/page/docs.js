// The reference: the routes and fields of /openapi.json.

function make(tag, text, ...children) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

function typeOf(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) {
    return [...new Set(schema.anyOf.filter((one) => one.type !== "null").map(typeOf))].join(" | ");
  }
  if (schema.type === "array") return `[${typeOf(schema.items ?? {})}]`;
  return schema.type ?? "any";
}

function range(schema) {
  const one = [schema, ...(schema.anyOf ?? [])].find((part) => part.minimum !== undefined || part.maximum !== undefined);
  if (!one || Math.abs(one.maximum ?? 0) > 1e6) return one?.minimum > -1e6 ? `at least ${one.minimum}` : "";
  if (one.maximum === undefined) return `at least ${one.minimum}`;
  return `${one.minimum ?? ""} to ${one.maximum}`;
}

function fields(schema) {
  const table = make("table");
  for (const [name, field] of Object.entries(schema.properties)) {
    const needed = schema.required?.includes(name) ? "required" : "";
    const text = [needed, range(field), field.description].filter(Boolean).join("; ");
    table.append(make("tr", "", make("td", "", make("code", name)), make("td", "", make("code", typeOf(field))), make("td", text)));
  }
  return table;
}

const document_ = await (await fetch("/openapi.json")).json();
const sections = {};
for (const [path, methods] of Object.entries(document_.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const heading = make("h3", "", make("b", method.toUpperCase()), path);
    const article = make("article", "", heading, make("p", (route.description ?? route.summary).replaceAll("``", "")));
    const ref = route.requestBody?.content["application/json"].schema.$ref;
    const schema = ref && document_.components.schemas[ref.split("/").pop()];
    if (schema) {
      const details = make("details", "", make("summary", "Fields"));
      if (schema.description) details.append(make("p", schema.description.replaceAll("``", "")));
      details.append(fields(schema));
      article.append(details);
    }
    (sections[route.tags?.[0] ?? "Other"] ??= []).push(article);
  }
}
for (const [name, articles] of Object.entries(sections)) {
  document.getElementById("reference").append(make("h2", name), ...articles);
}
