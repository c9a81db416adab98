// The chat: a conversation kept in this page, answers read as they stream.

const byId = (id) => document.getElementById(id);
const log = byId("log"), form = byId("form"), input = byId("input"), send = byId("send");
let conversation = [];
let running = null; // AbortController of the answer that is coming

function show(role) {
  const message = document.createElement("div");
  message.className = "message " + role;
  const body = document.createElement("div");
  body.className = "body";
  const note = document.createElement("small");
  message.append(body, note);
  byId("hello")?.remove();
  log.append(message);
  return { message, body, note };
}

// Text with ``` fences; everything else as it is. Nodes are made, never markup: what a model writes cannot act here.
function fill(body, text) {
  body.replaceChildren();
  text.split(/^```[^\n]*\n?/m).forEach((part, index) => {
    if (index % 2) {
      const block = document.createElement("pre");
      block.textContent = part.replace(/\n$/, "");
      body.append(block);
    } else if (part) {
      body.append(part);
    }
  });
}

function nearEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function request() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  };
}

// The JSON of each server-sent event, [DONE] excepted.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer() {
  const { message, body, note } = show("assistant");
  message.classList.add("live");
  running = new AbortController();
  send.textContent = "Stop";
  const begun = performance.now();
  let text = "", first = null, usage = null, reason = null;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const choice = event.choices[0];
      reason = choice?.finish_reason || reason;
      if (!choice?.delta.content) continue;
      first ??= performance.now();
      text += choice.delta.content;
      const follow = nearEnd();
      fill(body, text);
      if (follow) log.scrollTop = log.scrollHeight;
    }
    const seconds = (performance.now() - begun) / 1000;
    const count = usage ? usage.completion_tokens : 0;
    note.textContent = `${count} tokens in ${seconds.toFixed(1)} s, the first after ` +
      `${(((first ?? performance.now()) - begun) / 1000).toFixed(2)} s` + (reason === "length" ? ", cut off" : "");
  } catch (error) {
    if (error.name === "AbortError") {
      note.textContent = "stopped";
    } else {
      message.classList.add("failed");
      note.textContent = error.message;
    }
  }
  message.classList.remove("live");
  if (text) conversation.push({ role: "assistant", content: text });
  else conversation.pop(); // nothing came of the question: the next one takes its place
  if (!text && !note.textContent) body.textContent = "(no text)";
  running = null;
  send.textContent = "Send";
}

function ask(text) {
  if (running || !text.trim()) return;
  conversation.push({ role: "user", content: text });
  show("user").body.textContent = text;
  log.scrollTop = log.scrollHeight;
  input.value = "";
  grow();
  answer();
}

function grow() {
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask(input.value);
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) ask(input.value);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("ideas").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") ask(event.target.textContent);
});
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  log.replaceChildren();
  input.focus();
});
