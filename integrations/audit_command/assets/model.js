// The recording, turned into the life of every slot. No drawing here.
//
// A step has two times: 2 * step is its forward, 2 * step + 1 the end of its sampling.

// What a slot can hold, in the order of precedence where many share a pixel.
const STATES = [
  { key: "unused", label: "not in use" },
  { key: "left", label: "of a request that has ended" },
  { key: "empty", label: "handed out, not written" },
  { key: "draft", label: "draft, not judged yet" },
  { key: "idle", label: "in the prefix cache, its request has ended" },
  { key: "durable", label: "durable" },
  { key: "published", label: "in the prefix cache" },
  { key: "loaded", label: "loaded by a connector, or copied" },
  { key: "rejected", label: "rejected draft that stays in its slot" },
  { key: "wrong", label: "violation" },
];
const STATE = Object.fromEntries(STATES.map((state, number) => [state.key, number]));

// A row of the picture is one slot; the slots of blocks that were never written are left out.
class GroupLife {
  constructor(info, index, blocks) {
    Object.assign(this, { info, index, blocks });
    this.size = info.block_size;
    this.rowOfBlock = new Map(blocks.map((block, number) => [block, number * this.size]));
    this.rows = Array.from({ length: blocks.length * this.size }, () => []);
    this.now = this.rows.map(() => ({ state: STATE.unused, request: -1, position: -1 }));
  }

  rowOf(slot) {
    const first = this.rowOfBlock.get(Math.floor(slot / this.size));
    return first === undefined ? -1 : first + (slot % this.size);
  }

  slotOf(row) {
    return this.blocks[Math.floor(row / this.size)] * this.size + (row % this.size);
  }

  // Add one event to a row; `change` is what the slot holds from now on.
  add(row, time, what, change, violation) {
    const now = { ...this.now[row], ...change };
    this.rows[row].push({ time, what, ...now, violation });
    this.now[row] = now;
  }

  // The index of the event that a row's state at a time comes from; -1 before the first.
  at(row, time) {
    const events = this.rows[row];
    let low = 0, high = events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events[middle].time <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

function readRuns(recording) {
  const width = recording.run_fields.length, runs = [];
  for (let i = 0; i < recording.runs.length; i += width) {
    const [time, what, group, slot, count, request, position] = recording.runs.slice(i, i + width);
    runs.push({ time, what: recording.happenings[what], group, slot, count, request, position });
  }
  return runs;
}

function usedBlocks(info, index, runs, violations) {
  const blocks = new Set();
  for (const run of runs) {
    if (run.group !== index || run.what === "handed_out") continue;
    const last = Math.floor((run.slot + run.count - 1) / info.block_size);
    for (let b = Math.floor(run.slot / info.block_size); b <= last; b++) blocks.add(b);
  }
  for (const each of violations)
    if (each.group === info.name && each.block !== null) blocks.add(each.block);
  return [...blocks].sort((a, b) => a - b);
}

// Build the lives of all groups' slots. `restores`: windows put rejected slots back as they were.
function buildLives(recording, restores) {
  const runs = readRuns(recording);
  const groups = recording.groups.map(
    (info, index) => new GroupLife(info, index, usedBlocks(info, index, runs, recording.violations)),
  );
  const later = [];
  recording.requests.forEach((life, number) => {
    if (life.end !== null) later.push({ time: life.end, end: number });
  });
  recording.violations.forEach((violation, number) => {
    later.push({ time: 2 * violation.step + 0.5, violation, number });
  });
  later.sort((a, b) => a.time - b.time);
  const written = recording.requests.map(() => new Map());
  let next = 0;
  for (const run of runs) {
    while (next < later.length && later[next].time < run.time) applyLater(groups, later[next++], written);
    applyRun(groups, run, restores, written);
  }
  while (next < later.length) applyLater(groups, later[next++], written);
  return groups;
}

function applyRun(groups, run, restores, written) {
  const group = groups[run.group];
  if (run.what === "handed_out") takeFromOthers(groups, run);
  for (let offset = 0; offset < run.count; offset++) {
    const row = group.rowOf(run.slot + offset);
    if (row < 0) continue;
    const now = group.now[row];
    const mine = { request: run.request, position: run.position < 0 ? -1 : run.position + offset };
    const wrong = now.state === STATE.wrong;
    let change;
    switch (run.what) {
      case "handed_out": change = { state: STATE.empty, request: -1, position: -1 }; break;
      case "durable": change = { state: STATE.durable, ...mine }; break;
      case "draft":
        change = { state: STATE.draft, ...mine, before: { ...now, before: undefined } };
        break;
      case "kept": change = { state: STATE.durable, ...mine }; break;
      case "rejected": change = restores && now.before ? now.before : { state: STATE.rejected }; break;
      case "published": change = wrong ? {} : { state: STATE.published }; break;
      case "found":
        change = wrong ? {} : {
          request: run.request,
          state: [STATE.idle, STATE.left].includes(now.state) ? STATE.published : now.state,
        };
        break;
      case "imported": change = { state: STATE.loaded, ...mine }; break;
      case "copied": change = { state: STATE.loaded, request: -1, position: -1 }; break;
      default: change = {};
    }
    group.add(row, run.time, run.what, change);
    if (run.request >= 0 && change.request === run.request) {
      const rows = written[run.request];
      if (!rows.has(run.group)) rows.set(run.group, new Set());
      rows.get(run.group).add(row);
    }
  }
}

// Groups of one pool share its blocks: what one is given, the others lose.
function takeFromOthers(groups, run) {
  const owner = groups[run.group];
  if (owner.info.pool === null) return;
  const first = Math.floor(run.slot / owner.size);
  const last = Math.floor((run.slot + run.count - 1) / owner.size);
  for (const other of groups) {
    if (other === owner || other.info.pool !== owner.info.pool) continue;
    for (let block = first; block <= last; block++) {
      const row = other.rowOfBlock.get(block);
      if (row === undefined) continue;
      for (let i = row; i < row + other.size; i++)
        if (other.now[i].state !== STATE.unused)
          other.add(i, run.time, "taken", { state: STATE.unused, request: -1, position: -1 });
    }
  }
}

function applyLater(groups, event, written) {
  if (event.violation) {
    const group = groups.find((each) => each.info.name === event.violation.group);
    const row = group && event.violation.slot !== null ? group.rowOf(event.violation.slot) : -1;
    if (row >= 0)
      group.add(row, 2 * event.violation.step, "violation", { state: STATE.wrong }, event.number);
    return;
  }
  for (const [index, rows] of written[event.end]) {
    const group = groups[index];
    for (const row of rows) {
      const now = group.now[row];
      if (now.request !== event.end) continue;
      if (now.state === STATE.published) group.add(row, event.time, "left", { state: STATE.idle });
      else if ([STATE.durable, STATE.draft, STATE.rejected, STATE.loaded].includes(now.state))
        group.add(row, event.time, "left", { state: STATE.left });
    }
  }
}

// -- words ----------------------------------------------------------------------------------

const HAPPENED = {
  handed_out: () => "block handed out; whatever was here counts as unwritten",
  durable: (where) => `row written for ${where}`,
  draft: (where) => `draft row for ${where}`,
  kept: (where) => `draft accepted: ${where}`,
  rejected: () => "draft rejected",
  published: () => "published: other requests can find this row by its tokens",
  found: (where) => `found in the cache by ${where}`,
  exported: () => "handed to a connector",
  imported: (where) => `loaded by a connector for ${where}`,
  copied: () => "copied from another block",
  taken: () => "block handed to another group of layers",
  left: () => "its request has ended",
};

function requestName(page, number) {
  const life = page.recording.requests[number];
  return life ? life.name : "nobody";
}

function describeEvent(page, event) {
  if (event.what === "violation") return tellViolation(page.recording.violations[event.violation]);
  const where = `${requestName(page, event.request)}, position ${event.position}`;
  let text = HAPPENED[event.what](where);
  if (event.what === "rejected")
    text += page.restores ? "; the slot is as it was before" : "; its row stays in the slot";
  return text;
}

function describeTime(time) {
  return `step ${Math.floor(time / 2)}, ${time % 2 ? "after sampling" : "forward"}`;
}

// Ids from here on stand for a part of an image or other embedded content; see kvtxn.audit.digest.
const EMBEDDED = 2 ** 39;

function tokensText(tokens) {
  const words = (tokens ?? []).map((token) => (token >= EMBEDDED ? "(embedded)" : token));
  return words.length ? `\u2026${words.join(" ")}` : "not known";
}

const DEEDS = {
  published: "published it", exported: "sent it out", imported: "was given it", state: "went on from it",
};

// What differs between two rows, where positions and tokens do not show it.
const DIFFERENCES = {
  embedded: "another image or vector in the place of a token",
  extras: "another adapter or encoder input",
  earlier: "other tokens, images or vectors before its last tokens",
  unknown: "other tokens before its last ones, or another adapter",
};

function tellViolation(v) {
  if (v.kind === "weights") return `weights: the ${v.weights}'s had changed, and nobody had said so`;
  const deed = v.found === "count" ? "was told a wrong number of accepted drafts" : DEEDS[v.kind] ?? "read it";
  let text = `${v.kind}: ${v.request ?? "a request"} ${deed}, position ${v.position}, `;
  text += `tokens ${tokensText(v.expected)}`;
  if (v.brought && v.written_position === null)
    text += `; a connector brought it for ${v.written_request} in step ${v.written_step}`;
  else if (v.written_step !== null)
    text += `; ${v.brought ? "stored" : "written"} in step ${v.written_step} by ` +
      `${v.written_request ?? "a copy"}, tokens ${tokensText(v.written_for)}`;
  if (v.kind === "stale") text += `, by ${v.weights} weights ${v.age} epoch${v.age > 1 ? "s" : ""} before`;
  if (v.differs in DIFFERENCES) text += `, with ${DIFFERENCES[v.differs]}`;
  return text;
}
