// The words around the picture: the legend, one slot's life, and the tables. The verdict is HTML.

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function swatch(state) {
  const made = element("i", null, { "aria-hidden": "true" });
  made.style.background = `var(--${STATES[state].key})`;
  return made;
}

function showLegend(page) {
  const used = new Set();
  for (const group of page.groups)
    for (const events of group.rows) for (const event of events) used.add(event.state);
  const wanted = STATES.map((_, number) => number)
    .filter((number) => number > STATE.unused && number !== STATE.wrong && used.has(number));
  const items = wanted.map((number) => {
    const item = element("li");
    let label = STATES[number].label;
    if (number === STATE.draft && page.restores) label = page.draft_label;
    item.append(swatch(number), label);
    return item;
  });
  const ring = element("li");
  ring.append(element("i", null, { class: "ring", "aria-hidden": "true" }),
    page.recording.violations.length ? "a violation, with a line from the write that caused it" : "a violation (none here)");
  byId("legend").replaceChildren(...items, ring);
}

function cellText(page, group, cell) {
  const slot = group.slotOf(cell.row), block = Math.floor(slot / group.size);
  const events = group.rows[cell.row], index = group.at(cell.row, cell.time);
  const what = index < 0 ? "not in use" : STATES[events[index].state].label;
  const mine = index >= 0 && events[index].request >= 0 && events[index].position >= 0;
  const who = mine ? `, row of ${requestName(page, events[index].request)} at position ${events[index].position}` : "";
  return `slot ${slot} (block ${block}), ${describeTime(cell.time)}: ${what}${who}`;
}

function showSlot(page, group, row) {
  const slot = group.slotOf(row);
  byId("slot-title").textContent = `${group.info.is_state ? "State" : "Slot"} ${slot}`;
  byId("slot-where").textContent =
    `block ${Math.floor(slot / group.size)}, offset ${slot % group.size}, layers ${group.info.name}`;
  const items = group.rows[row].map((event) => {
    const item = element("li"), text = element("span");
    text.append(element("small", describeTime(event.time)), describeEvent(page, event));
    item.append(swatch(event.state), text);
    return item;
  });
  byId("slot-life").replaceChildren(...items);
}

function headed(table, columns) {
  const row = element("tr");
  for (const [name, number] of columns) row.append(element("th", name, { scope: "col", class: number ? "number" : "" }));
  const head = element("thead"), body = element("tbody");
  head.append(row);
  table.replaceChildren(head, body);
  return body;
}

function cells(row, values, columns) {
  values.forEach((value, index) => {
    const cell = element("td", null, { class: columns[index][1] ? "number" : "" });
    cell.append(value);
    row.append(cell);
  });
}

const REQUEST_COLUMNS = [
  ["request"], ["first step", 1], ["last step", 1], ["turns and resumptions", 1], ["rows found in the cache", 1],
  ["rows written", 1], ["drafts", 1], ["accepted", 1], ["rejected", 1], ["violations", 1],
];

function showRequests(page, choose) {
  const body = headed(byId("requests"), REQUEST_COLUMNS);
  const wrong = page.recording.requests.map(() => 0);
  for (const violation of page.recording.violations) if (violation.number >= 0) wrong[violation.number]++;
  page.recording.requests.forEach((life, number) => {
    const row = element("tr", null, { "data-request": number });
    const name = element("button", life.name, { "aria-pressed": "false" });
    name.addEventListener("click", () => choose(number));
    const count = wrong[number] ? element("span", wrong[number], { class: "bad" }) : "0";
    cells(row, [
      name, Math.floor(life.begin / 2), life.end === null ? "still there" : Math.floor(life.end / 2),
      life.admitted - 1, Math.max(0, life.reused), life.rows, life.drafts, life.accepted,
      life.drafts - life.accepted, count,
    ], REQUEST_COLUMNS);
    body.append(row);
  });
}

function markRequest(number) {
  for (const row of byId("requests").querySelectorAll("tbody tr")) {
    const chosen = Number(row.dataset.request) === number;
    row.classList.toggle("chosen", chosen);
    row.querySelector("button").setAttribute("aria-pressed", String(chosen));
  }
}

const VIOLATION_COLUMNS = [
  ["kind"], ["step", 1], ["read by"], ["position", 1], ["slot", 1], ["tokens expected"],
  ["computed for"], ["written in step", 1], ["written by"],
];

function showViolations(page, goTo) {
  const found = page.recording.violations;
  byId("violations-section").hidden = byId("jumps").hidden = !found.length;
  const body = headed(byId("violations"), VIOLATION_COLUMNS);
  found.forEach((v, number) => {
    const row = element("tr");
    const kind = element("button", v.kind);
    kind.addEventListener("click", () => goTo(number));
    cells(row, [
      kind, v.step, v.request ?? "", v.position ?? "", v.slot ?? "outside", tokensText(v.expected),
      tokensText(v.written_for), v.written_step ?? "", v.written_request ?? "",
    ], VIOLATION_COLUMNS);
    body.append(row);
  });
}

function byId(id) { return document.getElementById(id); }
