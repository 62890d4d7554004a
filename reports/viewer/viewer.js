(() => {
  "use strict";
  const DATA = JSON.parse(document.getElementById("viewer-data").textContent);
  const TEXT = 0, CLASS = 1, DRAFTED = 2, COMMITTED = 3, BARS = 4, START = 5, LONG = 6; // fields of a round
  const at = (id) => document.getElementById("viewer-" + id);
  const root = document.getElementById("viewer"), picks = ["run", "prompt", "method"].map(at);
  const slider = at("slider"), written = at("text"), canvas = at("canvas");
  let run, method, request, lanes = [], groups = [], now = 0;

  const made = (tag, classes, text) => {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const kind = (number) => DATA.kinds[number][0];
  const styled = (number) => "viewer-" + kind(number).replace(" ", "-");
  const named = (token) => run.texts[token] ?? `[${token}]`;
  const shown = (token) => named(token).replaceAll("\n", "↵").replaceAll("\t", "⇥") || `[${token}]`;
  const ms = (micro) => (micro / 1000).toFixed(1) + " ms";
  const number = (value) => value.toPrecision(3);

  // Choosing ----------------------------------------------------------------------------------------------------------

  function fill(select, names) {
    const before = Math.min(Math.max(select.selectedIndex, 0), names.length - 1);
    select.replaceChildren(...names.map((name, i) => new Option(name, i, false, i === before)));
    select.selectedIndex = before;
  }

  function choose() {
    const [runs, prompts, methods] = picks;
    run = DATA.runs[runs.selectedIndex];
    fill(prompts, run.prompts.map(([name], i) => `${i + 1}: ${name}`));
    fill(methods, run.methods.map((one) => one.name));
    method = run.methods[methods.selectedIndex];
    request = method.requests[prompts.selectedIndex];
    lanes = [...new Set(request.jobs.map(([lane]) => lane))];
    const lines = request.rounds.map((round) => Math.max(0, ...round[DRAFTED].map((node) => node[2] + 1)));
    at("draft").style.minHeight = Math.max(1, ...lines) * 1.75 + "rem"; // what is below stays in place
    slider.max = request.rounds.length;
    write(run.prompts[prompts.selectedIndex][1]);
    paint();
    now = 0;
    step(0);
  }

  function write(prompt) {
    groups = request.rounds.map((round, i) => {
      const group = made("span", "viewer-later");
      group.dataset.round = i;
      group.append(...round[COMMITTED].map(([token, origin], j) => {
        const text = made("i", styled(origin), named(token));
        text.dataset.place = j;
        return text;
      }));
      return group;
    });
    written.replaceChildren(made("span", "viewer-given", prompt), ...groups);
  }

  // One round ---------------------------------------------------------------------------------------------------------

  function step(target) {
    const count = request.rounds.length, next = Math.min(Math.max(target, 0), count - 1);
    if (!count) return empty();
    const focused = at("draft").contains(document.activeElement) || at("committed").contains(document.activeElement);
    groups[Math.min(now, count - 1)].classList.remove("viewer-now");
    for (let i = Math.min(now, next); i <= Math.max(now, next); i++) groups[i].classList.toggle("viewer-later", i > next);
    now = next;
    groups[now].classList.add("viewer-now");
    reveal(groups[now]);
    const round = request.rounds[now];
    slider.value = now + 1;
    slider.setAttribute("aria-valuetext", `round ${now + 1} of ${count}`);
    at("place").textContent = `${now + 1} / ${count}`;
    at("summary").textContent = round[TEXT];
    at("draft").replaceChildren(...round[DRAFTED].map(chip));
    at("committed").replaceChildren(...round[COMMITTED].map(ended));
    at("detail").textContent = "Point at a token, or tab to it, for its numbers.";
    at("job").textContent = request.laid ? "Sums of each stage, laid end to end; \"rest\" is sampling, the stop rule, verification and the like."
      : "Point at a bar for its job.";
    at("bars").replaceChildren(...lanes.map((lane) => drawn(lane, round)));
    at("cursor").style.left = 100 * (round[START] - begin()) / whole() + "%";
    at("cursor").style.width = 100 * round[LONG] / whole() + "%";
    if (focused) root.focus({ preventScroll: true });
  }

  function empty() {
    at("summary").textContent = "This request has no rounds.";
    for (const part of ["draft", "committed", "bars"]) at(part).replaceChildren();
  }

  function reveal(group) {
    const first = group.firstChild || group, top = first.offsetTop, view = written.clientHeight;
    if (top < written.scrollTop || top > written.scrollTop + view - 40) written.scrollTop = top - view / 2;
  }

  function chip([token, depth, line, fate], place) {
    const button = token_button(token, fate);
    button.style.gridColumn = depth;
    button.style.gridRow = line + 1;
    button.dataset.drafted = place;
    return button;
  }

  function ended([token, origin], place) {
    const button = token_button(token, origin);
    button.dataset.committed = place;
    return button;
  }

  function token_button(token, which) {
    const button = made("button", "viewer-chip " + styled(which));
    const mark = made("b", "", DATA.kinds[which][1]);
    mark.setAttribute("aria-hidden", "true");
    button.type = "button";
    button.append(mark, shown(token));
    button.setAttribute("aria-label", `${shown(token)}, ${kind(which)}`);
    return button;
  }

  function drafted_detail(round, [token, depth, , fate, q, p, predicted]) {
    const parts = [`"${shown(token)}" (token ${token}), ${kind(fate)}`, `position ${depth} of the draft`];
    parts.push(q === null ? "q not recorded" : `q ${number(q)}`);
    parts.push(p === null ? "p not read by the verifier" : `p ${number(p)}`);
    if (predicted !== null) parts.push(`${method.predicted} ${number(predicted)}`);
    if (round[CLASS] !== null) parts.push(`class ${round[CLASS]}`);
    return parts.join("; ");
  }

  function committed_detail(round, place) {
    const [token, origin] = round[COMMITTED][place];
    const accepted = round[DRAFTED].filter((node) => kind(node[3]) === "accepted");
    return place < accepted.length ? drafted_detail(round, accepted[place]) : `"${shown(token)}" (token ${token}), ${kind(origin)}: no draft token`;
  }

  function tell(element) {
    const round = request.rounds[now], one = element.closest("[data-drafted], [data-committed], [data-place], [data-job]");
    if (!one) return;
    const { drafted, committed, place, job } = one.dataset;
    if (job !== undefined) at("job").textContent = job;
    else if (drafted !== undefined) at("detail").textContent = drafted_detail(round, round[DRAFTED][drafted]);
    else if (committed !== undefined) at("detail").textContent = committed_detail(round, +committed);
    else {
      const there = +one.parentNode.dataset.round;
      at("detail").textContent = `Round ${there + 1}: ` + committed_detail(request.rounds[there], +place);
    }
  }

  // Time --------------------------------------------------------------------------------------------------------------

  const begin = () => request.rounds[0][START];
  const ends = (round) => round[START] + round[LONG];
  const whole = () => ends(request.rounds.at(-1)) - begin() || 1;

  function drawn(lane, round) {
    const name = DATA.lanes[lane], total = round[LONG] || 1, row = made("div", "viewer-lane");
    const bars = round[BARS].filter(([job]) => request.jobs[job][0] === lane), track = made("div", "viewer-track viewer-track-" + name);
    const busy = bars.reduce((sum, bar) => sum + bar[2], 0);
    for (const [job, start, long, rows] of bars) {
      const bar = made("div", "viewer-bar viewer-lane-" + name, request.jobs[job][1]);
      bar.style.left = 100 * start / total + "%";
      bar.style.width = 100 * long / total + "%";
      bar.title = bar.dataset.job = `${name}: ${request.jobs[job][1]}, ${ms(long)}` + (rows === undefined ? "" : `, ${rows} rows`);
      track.append(bar);
    }
    const idle = Math.max(0, total - busy);
    track.title = `${name}: idle ${ms(idle)}`;
    const model = name !== "rest", share = (100 * (model ? idle : busy) / total).toFixed(0);
    row.append(made("span", "", `${name}: ${model ? "idle" : "busy"} ${share} %`), track);
    return row;
  }

  function paint() {
    const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1, { rounds, jobs } = request;
    if (!rounds.length || !box.width) return;
    canvas.width = box.width * scale;
    canvas.height = box.height * scale;
    const style = getComputedStyle(root), pen = canvas.getContext("2d"), high = canvas.height / lanes.length;
    const colours = DATA.lanes.map((lane) => style.getPropertyValue("--v-" + lane)), scaled = canvas.width / whole();
    for (const round of rounds)
      for (const [job, start, long] of round[BARS]) {
        const lane = jobs[job][0];
        pen.fillStyle = colours[lane];
        pen.fillRect(scaled * (round[START] + start - begin()), high * lanes.indexOf(lane) + 1, scaled * long, high - 2);
      }
  }

  function clicked(event) {
    const box = canvas.getBoundingClientRect(), { rounds } = request;
    const time = begin() + whole() * (event.clientX - box.left) / box.width;
    const found = rounds.findIndex((round) => time < ends(round));
    step(found < 0 ? rounds.length - 1 : found);
  }

  // Events ------------------------------------------------------------------------------------------------------------

  const keys = { ArrowLeft: () => now - 1, ArrowRight: () => now + 1, PageUp: () => now - 10, PageDown: () => now + 10, Home: () => 0,
    End: () => request.rounds.length - 1 };
  root.addEventListener("keydown", (event) => {
    const own = event.target.matches("select, input"), modified = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
    if (own || modified || !(event.key in keys)) return;
    event.preventDefault();
    step(keys[event.key]());
  });
  for (const [id, where] of [["first", "Home"], ["back", "ArrowLeft"], ["next", "ArrowRight"], ["last", "End"]])
    at(id).addEventListener("click", () => step(keys[where]()));
  slider.addEventListener("input", () => step(slider.value - 1));
  for (const pick of picks) pick.addEventListener("change", choose);
  root.addEventListener("pointerover", (event) => tell(event.target));
  root.addEventListener("focusin", (event) => tell(event.target));
  written.addEventListener("click", (event) => {
    const group = event.target.closest("[data-round]");
    if (group) step(+group.dataset.round);
  });
  canvas.addEventListener("click", clicked);
  new ResizeObserver(paint).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

  fill(picks[0], DATA.runs.map((one) => one.name));
  at("run-label").hidden = DATA.runs.length < 2;
  choose();
})();
