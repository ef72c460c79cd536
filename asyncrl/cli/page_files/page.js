"use strict";
// Everything that a run has written reaches the page as text: `make` sets textContent and properties, never HTML.

const COLOURS = ["#3b7dd8", "#e07b39", "#3a9d5d", "#b1509e", "#c9a227", "#5aa9b8", "#d0525b", "#7a6fd0", "#8a8f98"];
const EVERY_MS = 400;
const RUNS_EVERY = 2; // turns without news, after which the states of all runs are asked for
const byId = (id) => document.getElementById(id);
const saved = byId("saved") && JSON.parse(byId("saved").textContent); // the answers, in a file of `plot --html`
const VIEWS = saved ? { learning, time, advice } : { learning, time, processes, trajectories, advice };
const fragment = location.hash.slice(1);
if (fragment) {
  sessionStorage.setItem("token", fragment);
  history.replaceState(null, "", "/"); // the token stays out of the address that people copy
}
const state = { view: "learning", chosen: null, runs: [], file: "", sequence: 0, colour: "version", filter: {} };
const charts = new Map(); // of the view: name of the panel -> {plot, names}
let drawn = 0; // counts drawings, so that a late answer of an earlier view is dropped
let running = 0; // turns that wait for answers
let turns = 0;
let news = 0; // counts contents that were received
const received = new Map(); // path -> {url, tag, drawing} of the content that it gave last

function make(kind, properties = {}, ...children) {
  const node = Object.assign(document.createElement(kind), properties);
  node.append(...children.filter((child) => child !== null));
  return node;
}

// null: this drawing has the content already
async function ask(path, query = {}) {
  if (saved) return saved[path + (query.run || "")];
  const url = `${path}?${new URLSearchParams(query)}`;
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
  const [last, drawing] = [received.get(path), drawn];
  if (last?.url === url && last.drawing === drawing) headers["If-None-Match"] = last.tag;
  const answer = await fetch(url, { headers });
  if (answer.status === 304) return null;
  if (answer.status === 401) throw new Error("The token is missing or old: open the URL that the command has printed.");
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || `status ${answer.status}`);
  received.set(path, { url, tag: answer.headers.get("ETag"), drawing });
  news += 1;
  return content;
}

const number = (value, digits = 4) => (value === null || value === undefined ? "" : String(Number(value.toPrecision(digits))));
const first = () => [...state.chosen][0];

// ---------------------------------------------------------------------------------------------------------------- frame

async function turn(anew = false) {
  if (!anew && running) return;
  const mine = anew ? ++drawn : drawn;
  running += 1;
  const before = news;
  const isCurrent = () => mine === drawn;
  try {
    if (anew || !state.chosen) await askRuns(isCurrent);
    if (!isCurrent()) return;
    if (anew) clear();
    if (state.chosen.size) await VIEWS[state.view](isCurrent, anew);
    if (!anew && (news > before || turns++ % RUNS_EVERY === 0)) await askRuns(isCurrent);
    byId("said").textContent = "";
  } catch (error) {
    if (mine === drawn) byId("said").textContent = error.message;
  } finally {
    running -= 1;
  }
}

async function askRuns(isCurrent) {
  const runs = await ask("/api/runs");
  if (!runs || !isCurrent()) return;
  state.runs = runs;
  state.chosen ??= new Set(runs.slice(0, 8).map((run) => run.name));
  showRuns();
}

function clear() {
  for (const { plot } of charts.values()) plot.destroy();
  charts.clear();
  byId("view").replaceChildren();
}

function showRuns() {
  const texts = state.runs.map((run) => {
    const reward = run.reward === null ? "" : `, reward ${number(run.reward, 3)}`;
    return `${run.name}: ${run.state}, step ${run.step}/${run.total_steps || "?"}${reward} ${run.problem}`;
  });
  const boxes = [...byId("runs").querySelectorAll("label")];
  if (boxes.length !== texts.length)
    byId("runs").append(
      ...state.runs.map((run) => {
        const box = make("input", { type: "checkbox", checked: state.chosen.has(run.name) });
        box.onchange = () => {
          state.chosen[box.checked ? "add" : "delete"](run.name);
          state.file = "";
          turn(true);
        };
        box.hidden = Boolean(saved); // it has one answer, of all runs
        return make("label", {}, box, make("span"));
      }),
    );
  byId("runs").querySelectorAll("span").forEach((span, index) => (span.textContent = ` ${texts[index]}`));
}

function showTabs() {
  const buttons = Object.keys(VIEWS).map((name, index) => {
    const button = make("button", { textContent: name, type: "button", role: "tab" });
    button.title = `key ${index + 1}`;
    button.onclick = () => choose(name);
    return button;
  });
  byId("tabs").replaceChildren(...buttons);
  document.onkeydown = (event) => {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const names = Object.keys(VIEWS);
    const steps = event.target.matches("[role=tab]") ? { ArrowLeft: -1, ArrowRight: 1 }[event.key] : undefined;
    const index = steps ? (names.indexOf(state.view) + steps + names.length) % names.length : Number(event.key) - 1;
    if (names[index]) choose(names[index], Boolean(steps));
  };
}

function choose(name, focus = false) {
  state.view = name;
  for (const button of byId("tabs").children) {
    button.setAttribute("aria-selected", button.textContent === name);
    if (focus && button.textContent === name) button.focus();
  }
  turn(true);
}

// --------------------------------------------------------------------------------------------------------------- charts

function draw(panels, place, key) {
  const all = panels.flatMap((panel) => panel.series.flatMap((one) => [one.x[0], one.x.at(-1)]));
  const ends = [Math.min(...all), Math.max(...all)];
  for (const panel of panels) {
    const several = new Set(panel.series.map((one) => one.run)).size > 1;
    const names = panel.series.map((one) => [several ? one.run : "", one.name].filter(Boolean).join(", ") || panel.title);
    const tables = panel.series.map((one) => [one.x, one.y]);
    const data = uPlot.join([...tables, [ends, [null, null]]]).slice(0, -1); // all panels have the same axis
    const newest = panel.series.map((one, at) => `${names[at]}: ${number(one.y.findLast((y) => y !== null) ?? null)}`);
    let chart = charts.get(panel.name);
    if (chart && String(chart.names) !== String(names)) {
      chart.plot.destroy();
      chart.figure.remove();
      chart = undefined;
    }
    if (!chart) {
      const box = make("div");
      const caption = make("figcaption");
      const figure = make("figure", {}, make("h2", { textContent: panel.title }), box, caption);
      place.append(figure);
      chart = { figure, box, caption, names, plot: new uPlot(options(panel, names, box, key), data, box) };
      charts.set(panel.name, chart);
    } else {
      const zoomed = chart.plot.scales.x.min > chart.first || chart.plot.scales.x.max < chart.last;
      chart.plot.setData(data, !zoomed);
    }
    [chart.first, chart.last] = [data[0][0], data[0].at(-1)];
    chart.caption.textContent = `${panel.unit}; newest: ${newest.join("; ")}`;
  }
}

function options(panel, names, box, key) {
  const styles = getComputedStyle(document.documentElement);
  const [ink, line] = ["--faint", "--line"].map((name) => styles.getPropertyValue(name));
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  const series = panel.series.map((one, at) => {
    const colour = COLOURS[at % COLOURS.length];
    const dots = panel.points[at];
    const width = dots ? 0 : 1.5;
    const shown = { label: names[at], stroke: colour, width, value: (_, value) => number(value) };
    if (dots) Object.assign(shown, { points: { show: true, size: 7, fill: colour } });
    if (panel.name === "versions") shown.paths = uPlot.paths.stepped({ align: 1 });
    return shown;
  });
  return {
    width: Math.max(200, box.clientWidth),
    height: 190,
    scales: { x: { time: false } },
    series: [{ label: panel.x, value: (_, value) => number(value, 7) }, ...series],
    axes: [{ ...axis, size: 28 }, { ...axis, size: 56 }],
    cursor: { sync: { key } },
  };
}

function chartPlace() {
  let place = byId("view").querySelector(".charts");
  if (!place) byId("view").append((place = make("div", { className: "charts" })));
  return place;
}

new ResizeObserver(() => {
  for (const { plot, box } of charts.values()) plot.setSize({ width: Math.max(200, box.clientWidth), height: 190 });
}).observe(byId("view"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => turn(true));

// ---------------------------------------------------------------------------------------------------------------- views

async function learning(isCurrent) {
  const content = await ask("/api/learning", { runs: JSON.stringify([...state.chosen]) });
  if (!content || !isCurrent()) return;
  const { panels } = content;
  if (!panels.length) byId("view").replaceChildren("No train step and no evaluation yet.");
  draw(panels, chartPlace(), "steps");
}

async function time(isCurrent) {
  const content = await ask("/api/time", { run: first() });
  if (!content || !isCurrent()) return;
  const { panels, events } = content;
  draw(panels, chartPlace(), "seconds");
  byId("events")?.remove();
  const rows = events.map(([seconds, text]) => [new Date(seconds * 1000).toLocaleString(), text]);
  byId("view").append(table("events", ["time", `attempts, restarts and faults of ${first()}`], rows.reverse()));
}

async function processes(isCurrent) {
  const seen = await ask("/api/processes", { run: first() });
  if (!seen || !isCurrent()) return;
  const rows = seen.workers.map((worker) => [
    worker.worker + (worker.host ? ` on ${worker.host}` : ""),
    worker.state + (worker.error ? `: ${worker.error}` : ""),
    String(worker.restarts),
    `${number(worker.age_s, 2)} s ago`,
    worker.version,
    `${number(worker.memory_bytes / 2 ** 30, 2)} GiB`,
    worker.waits.join("\n"),
    Object.entries(worker.queues).map(([name, depth]) => `${name}=${depth}`).join(" "),
  ]);
  const names = ["process", "state", "restarts", "heartbeat", "version", "peak memory", "waits for", "queues"];
  byId("view").replaceChildren(
    make("h2", { textContent: seen.title }),
    ...seen.notes.map((note) => make("p", { className: "bad", textContent: note })),
    table("processes", names, rows),
  );
}

async function advice(isCurrent) {
  const found = await ask("/api/advice", { runs: JSON.stringify([...state.chosen]) });
  if (!found || !isCurrent()) return;
  const shown = found.map(({ run, title, figure, remedy }) =>
    make(
      "article",
      {},
      make("h2", { textContent: `${run}: ${title}` }),
      make("p", { textContent: figure }),
      make("p", { textContent: remedy }),
    ),
  );
  byId("view").replaceChildren(...(shown.length ? shown : ["The records of these runs give no reason for advice."]));
}

function table(id, names, rows, pick = null) {
  const head = make("tr", {}, ...names.map((name) => make("th", { textContent: name, scope: "col" })));
  const body = rows.map((cells, at) => {
    const row = make("tr", {}, ...cells.map((cell) => make("td", { className: "text", textContent: cell })));
    if (pick) {
      const button = make("button", { type: "button", textContent: cells[0], onclick: () => pick(at) });
      row.firstChild.replaceChildren(button);
    }
    return row;
  });
  return make("div", { className: "wide", id }, make("table", { className: "rows" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

// --------------------------------------------------------------------------------------------------------- trajectories

const FILTERS = { min_reward: "reward from", max_reward: "to", min_tokens: "tokens from", max_tokens: "to", task: "task" };

async function trajectories(isCurrent, anew) {
  const view = byId("view");
  if (anew) {
    const inputs = Object.entries(FILTERS).map(([name, label]) => {
      const type = name === "task" ? "text" : "number";
      const input = make("input", { type, step: "any", value: state.filter[name] || "" });
      input.onchange = () => {
        state.filter[name] = input.value;
        list(isCurrent);
      };
      return make("label", {}, `${label} `, input);
    });
    const form = make("form", { onsubmit: () => false }, ...inputs);
    view.append(make("div", { id: "one" }), form, make("div", { id: "list" }));
    if (state.file) await open(isCurrent);
  }
  await list(isCurrent);
}

async function list(isCurrent) {
  const filter = Object.entries(state.filter).filter(([, value]) => value !== "");
  const content = await ask("/api/trajectories", { run: first(), ...Object.fromEntries(filter) });
  if (!content || !isCurrent()) return;
  const { found, searched, total } = content;
  const mark = found.map((one) => one.file).join();
  if (byId("list").dataset.mark === mark) return;
  byId("list").dataset.mark = mark;
  const rows = found.map((one) => [
    one.ticket.split("-").slice(1, 3).join("-"),
    String(one.step),
    one.task,
    one.rewards.map((reward) => number(reward, 3)).join(" "),
    one.response_lengths.join(" "),
    one.versions,
  ]);
  const shown = table("found", ["prompt", "step", "task", "rewards", "tokens", "versions"], rows, (at) => {
    Object.assign(state, { file: found[at].file, sequence: 0 });
    open(isCurrent).then(() => byId("one").querySelector("select")?.focus());
  });
  const told = `${found.length} groups, of the newest ${searched} of ${total} recorded in ${first()}`;
  const hint = total ? "" : ". A run records them with record.trajectories=true";
  byId("list").replaceChildren(make("p", { className: "faint", textContent: told + hint }), shown);
}

async function open(isCurrent) {
  const query = { run: first(), file: state.file, sequence: state.sequence };
  const shown = await ask("/api/trajectory", query).catch((error) => (byId("said").textContent = error.message) && null);
  if (!shown || !isCurrent()) return;
  byId("said").textContent = "";
  const options = shown.sequences.map(({ index, reward, finish, response_tokens }) =>
    make("option", { value: index, textContent: `${index}: reward ${number(reward, 3)}, ${response_tokens} tokens, ${finish}` }),
  );
  const sequence = make("select", { ariaLabel: "response" }, ...options);
  sequence.value = state.sequence;
  sequence.onchange = () => {
    state.sequence = Number(sequence.value);
    open(isCurrent);
  };
  const colours = Object.keys(COLOURINGS).map((name) => make("option", { textContent: name }));
  const colour = make("select", { ariaLabel: "colour by" }, ...colours);
  colour.value = state.colour;
  const places = [];
  const paint = () => {
    state.colour = colour.value;
    const paintOne = COLOURINGS[state.colour](shown.tokens);
    places.forEach((span, at) => (span.style.backgroundColor = paintOne(shown.tokens[at]) || ""));
  };
  colour.onchange = paint;
  const about = make("div", { id: "about", role: "status", textContent: "Left and right move through the tokens." });
  const turns = turnsOf(shown.tokens).map(({ kind, begin, end }, at, all) => {
    const spans = shown.tokens.slice(begin, end).map((token) => {
      const span = make("span", { textContent: token.text ?? `[${token.id}] ` });
      if (!token.loss_mask) span.className = "untrained";
      places.push(span);
      return span;
    });
    const title = make("summary", { textContent: `${kind}: ${end - begin} tokens` });
    const isOpen = all.length < 4 || at === all.length - 1;
    return make("details", { open: isOpen }, title, make("div", { className: "tokens" }, ...spans));
  });
  let here = -1;
  const point = (at) => {
    if (!places[at]) return;
    places[here]?.classList.remove("here");
    here = at;
    places[at].classList.add("here");
    const { text, ...values } = shown.tokens[at];
    values.ratio = ratio(values);
    const told = Object.entries(values).filter(([, value]) => value !== null);
    about.textContent = `${JSON.stringify(text)}  ${told.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`).join("  ")}`;
  };
  const body = make("div", { tabIndex: 0, ariaLabel: "tokens" }, ...turns);
  body.onmouseover = body.onclick = (event) => point(places.indexOf(event.target));
  body.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    point(Math.min(Math.max(here + step, 0), places.length - 1));
  };
  const used = shown.trained ? `train step ${shown.step + 1}` : `batch ${shown.step}, not trained`;
  const title = `${shown.ticket}, task ${shown.task}, ${used}`;
  const form = make("form", { onsubmit: () => false }, make("label", {}, "response ", sequence), make("label", {}, "colour by ", colour));
  const notes = shown.notes.map((note) => make("p", { className: "faint", textContent: note }));
  byId("one").replaceChildren(make("h2", { textContent: title }), form, ...notes, body, about);
  paint();
}

// Consecutive tokens that the model sampled, or that it did not: the prompt, then turns of the environment
function turnsOf(tokens) {
  const turns = [];
  tokens.forEach((token, at) => {
    const kind = token.prompt ? "prompt" : token.version === null ? "environment" : "model";
    if (turns.at(-1)?.kind !== kind) turns.push({ kind, begin: at, end: at });
    turns.at(-1).end = at + 1;
  });
  return turns;
}

// The behaviour weight: proximal over behaviour policy
const ratio = (token) =>
  token.proximal_logprob === null || token.behaviour_logprob === null ? null : Math.exp(token.proximal_logprob - token.behaviour_logprob);

function diverging(value, most) {
  const share = Math.min(Math.abs(value) / (most || 1), 1);
  return value ? `rgb(${value > 0 ? "40 160 80" : "220 60 60"} / ${0.6 * share})` : "";
}

const COLOURINGS = {
  version: (tokens) => {
    const versions = [...new Set(tokens.map((token) => token.version).filter(Boolean))];
    return ({ version }) => version && `${COLOURS[versions.indexOf(version) % COLOURS.length]}66`;
  },
  logprob: () => (token) => token.behaviour_logprob !== null && diverging(token.behaviour_logprob, 5),
  ratio: () => (token) => ratio(token) !== null && diverging(Math.log(ratio(token)), 0.5),
  advantage: (tokens) => {
    const most = Math.max(...tokens.map((token) => Math.abs(token.advantage ?? 0)));
    return ({ advantage }) => advantage !== null && diverging(advantage, most);
  },
  mask: () => ({ loss_mask }) => loss_mask && "rgb(60 125 216 / 0.3)",
};

// ---------------------------------------------------------------------------------------------------------------- begin

showTabs();
choose("learning");
(async () => {
  while (!saved) {
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    if (!document.hidden) await turn();
  }
})();
