// The text, each token in the colour of its source, and the legend of the colours.
// What the model writes becomes text nodes and never markup.

// Further ones share the colour of the last.
const NUM_DEPTHS = 6;

const EXPLAINED = [
  ["recovered", "corrected", "the guess was wrong here; this is the model's own token"],
  ["bonus", "bonus", "all guesses were right, and the check gave one more for free"],
  ["plain", "plain", "nothing was guessed in this pass"],
];

/** The class of a token's colour. */
export function classOf(source) {
  const depth = depthOf(source);
  return depth ? `accepted-${Math.min(depth, NUM_DEPTHS)}` : source;
}

/** How far ahead a token was guessed; 0 where it was not. */
function depthOf(source) {
  return source.startsWith("accepted_") ? Number(source.slice("accepted_".length)) : 0;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export class TextView {
  constructor(container) {
    this.container = container;
  }

  /** Begins anew, with the text that is continued. */
  clear(prompt) {
    this.container.replaceChildren();
    if (prompt) this.container.append(element("span", "prompt", prompt));
  }

  add(steps) {
    const view = this.container;
    const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 8;
    for (const step of steps) view.append(passOf(step));
    if (isAtEnd) view.scrollTop = view.scrollHeight;
  }

  /** Marks the token that ended the text, which has no text itself. */
  markEnd() {
    const last = this.container.lastElementChild?.lastElementChild;
    if (last?.classList.contains("token") && last.textContent === "") {
      last.classList.add("end");
      last.textContent = "end of text";
    }
  }
}

function passOf(step) {
  const pass = element("span", "pass");
  step.token_sources.forEach((source, i) => {
    const text = step.token_texts[i];
    const token = element("span", `token ${classOf(source)}`, text);
    token.dataset.source = source;
    token.title = titleOf(source, step.num_draft_tokens);
    if (text.startsWith("\n")) token.classList.add("breaks");
    pass.append(token);
  });
  return pass;
}

function titleOf(source, numDrafts) {
  const depth = depthOf(source);
  if (depth) return `guess ${depth} of ${numDrafts}, kept`;
  return EXPLAINED.find(([name]) => name === source)?.[1] ?? source;
}

export class Legend {
  constructor(list) {
    this.list = list;
    this.counts = new Map();
  }

  /** Lists the sources that there can be with so many guesses. */
  build(maxDrafts) {
    this.list.replaceChildren();
    this.counts.clear();
    const kept = Array.from({ length: maxDrafts }, (_, i) => [`accepted_${i + 1}`, `guess ${i + 1}`]);
    if (kept.length) this.#entry(kept, "kept: the model agreed (stronger colour: guessed further ahead)");
    for (const [source, name, told] of EXPLAINED) {
      if (maxDrafts || source === "plain") this.#entry([[source, name]], told);
    }
  }

  show(bySource) {
    for (const [source, count] of this.counts) count.textContent = bySource.get(source) ?? 0;
  }

  #entry(sources, told) {
    const entry = element("li", "");
    for (const [source, name] of sources) {
      const count = element("b", "count", "0");
      entry.append(element("span", `token ${classOf(source)}`, name), " ", count, " ");
      this.counts.set(source, count);
    }
    entry.append(element("small", "", told));
    this.list.append(entry);
  }
}
