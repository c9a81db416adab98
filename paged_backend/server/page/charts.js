// The engine at work: /stats every second, drawn as small charts of the last two minutes.

const LENGTH = 120;
const series = { running: [], waiting: [], rate: [], kv: [], prefix: [] };
const charts = {
  requests: { lines: ["running", "waiting"], least: 4 },
  rate: { lines: ["rate"], least: 10 },
  kv: { lines: ["kv"], least: 0, most: 100 },
  prefix: { lines: ["prefix"], least: 0, most: 100 },
};
let last = null;
const byId = (id) => document.getElementById(id);

function add(name, value) {
  series[name].push(value);
  if (series[name].length > LENGTH) series[name].shift();
}

function take(stats) {
  const now = performance.now() / 1000, engine = stats.engine;
  const hits = engine.prefix_cache_hits, asked = engine.prefix_cache_queries;
  let rate = 0, prefix = null;
  if (last && now > last.now) {
    rate = Math.max(stats.output_tokens - last.tokens, 0) / (now - last.now);
    // a restarted engine counts from 0 again
    if (asked > last.asked) prefix = (100 * (hits - last.hits)) / (asked - last.asked);
  }
  last = { now, tokens: stats.output_tokens, hits, asked };
  const busy = stats.in_flight > 0; // the engine's own counts are up to a second old
  add("running", busy ? engine.num_running : 0);
  add("waiting", busy ? engine.num_waiting : 0);
  add("rate", rate);
  add("kv", 100 * engine.kv_usage);
  add("prefix", prefix ?? series.prefix.at(-1) ?? 0);
  byId("requests").value = `${series.running.at(-1)} / ${series.waiting.at(-1)}`;
  byId("rate").value = rate.toFixed(rate < 10 ? 1 : 0);
  byId("kv").value = `${(100 * engine.kv_usage).toFixed(1)} %`;
  byId("prefix").value = asked ? `${((100 * hits) / asked).toFixed(0)} % overall` : "none yet";
  byId("model").textContent = stats.model;
  health(stats.health);
  facts(stats);
}

function health(state) {
  const badge = byId("health");
  badge.textContent = state;
  badge.className = "pill " + (state === "ok" ? "good" : "bad");
}

function facts(stats) {
  const engine = stats.engine;
  const size = (bytes) => (bytes >= 1e9 ? (bytes / 1e9).toFixed(1) + " GB" : (bytes / 1e6).toFixed(0) + " MB");
  const rows = {
    "Context": stats.max_model_len.toLocaleString() + " tokens",
    "KV pool": size(engine.kv_blocks_total * engine.kv_block_bytes),
    "Cached prefix blocks": engine.kv_blocks_cached.toLocaleString(),
    "KV memory wasted": (100 * engine.kv_waste).toFixed(1) + " %",
    "Tokens generated": stats.output_tokens.toLocaleString(),
    "Preemptions": engine.num_preemptions.toLocaleString(),
    "Engine restarts": stats.restarts.toLocaleString(),
  };
  byId("facts").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => {
    const term = document.createElement("dt"), detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    return [term, detail];
  }));
}

function draw(canvas) {
  const chart = charts[canvas.dataset.chart], style = getComputedStyle(document.documentElement);
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const top = chart.most ?? Math.max(chart.least, ...chart.lines.flatMap((name) => series[name])) * 1.15;
  const x = (index, count) => width - 1 - ((count - 1 - index) * (width - 2)) / (LENGTH - 1);
  const y = (value) => height - 3 - (Math.min(value, top) / top) * (height - 8);
  pen.strokeStyle = style.getPropertyValue("--line");
  pen.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(0, y(part * top) + 0.5);
    pen.lineTo(width, y(part * top) + 0.5);
    pen.stroke();
  }
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.font = "10px system-ui, sans-serif";
  pen.fillText(chart.most ? "100 %" : Math.round(top).toString(), 2, y(top) + 11);
  chart.lines.forEach((name, number) => {
    const values = series[name];
    if (values.length < 2) return;
    pen.beginPath();
    values.forEach((value, index) => pen[index ? "lineTo" : "moveTo"](x(index, values.length), y(value)));
    pen.strokeStyle = style.getPropertyValue(number ? "--second" : "--accent");
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(width - 1, y(0));
    pen.lineTo(x(0, values.length), y(0));
    pen.globalAlpha = 0.12;
    pen.fillStyle = pen.strokeStyle;
    pen.fill();
    pen.globalAlpha = 1;
  });
}

function drawAll() {
  document.querySelectorAll("canvas").forEach(draw);
}

async function look() {
  try {
    const response = await fetch("/stats");
    if (!response.ok) throw new Error();
    take(await response.json());
  } catch {
    health("unreachable");
  }
  drawAll();
}

look();
setInterval(look, 1000);
window.addEventListener("resize", drawAll);
