// Counts what the guesses bring while the text grows, as the server does.

export class Tally {
  constructor() {
    this.passes = 0;
    this.tokens = 0;
    this.drafts = 0;
    this.accepted = 0;
    this.draftedAt = [];
    this.acceptedAt = [];
    this.bySource = new Map();
    // The sources of each pass, for the chart.
    this.history = [];
    this.firstTime = null;
    this.lastTime = null;
    this.tokensOfFirst = 0;
  }

  /** Counts the steps of one chunk, which came at `now`, in milliseconds. */
  add(steps, now) {
    for (const step of steps) this.#addStep(step);
    if (!steps.length || !this.tokens) return;
    if (this.firstTime === null) {
      this.firstTime = now;
      this.tokensOfFirst = this.tokens;
    }
    this.lastTime = now;
  }

  #addStep({ num_draft_tokens: drafted, token_sources: sources }) {
    const accepted = sources.filter((source) => source.startsWith("accepted_")).length;
    this.passes += 1;
    this.tokens += sources.length;
    this.drafts += drafted;
    this.accepted += accepted;
    for (let i = 0; i < drafted; i += 1) {
      this.draftedAt[i] = (this.draftedAt[i] ?? 0) + 1;
      this.acceptedAt[i] = (this.acceptedAt[i] ?? 0) + (i < accepted ? 1 : 0);
    }
    for (const source of sources) {
      this.bySource.set(source, (this.bySource.get(source) ?? 0) + 1);
    }
    this.history.push(sources);
  }

  /** Tokens a second after the first ones, which waited for the prompt; null before. */
  get tokensPerSecond() {
    const milliseconds = this.lastTime - this.firstTime;
    return milliseconds > 0 ? ((this.tokens - this.tokensOfFirst) * 1000) / milliseconds : null;
  }

  get tokensPerPass() {
    return this.passes ? this.tokens / this.passes : null;
  }

  get acceptanceRate() {
    return this.drafts ? this.accepted / this.drafts : null;
  }
}
