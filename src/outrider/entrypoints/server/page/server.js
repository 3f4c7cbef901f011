// What the page asks of the server, and nothing else is asked of anybody.

/** An answer that is an error; `status` is 0 where it came in the midst of a stream. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The served model: its name, the most guesses of a pass, and tokens of prompt and text. */
export async function fetchModel(key) {
  const response = await ask("/v1/models", { headers: headersOf(key) });
  const [card] = (await response.json()).data;
  return {
    name: card.id,
    maxDrafts: card.num_speculative_tokens,
    maxTokens: card.max_model_len,
  };
}

/**
 * Runs a request, and yields what each chunk tells: `steps`, the passes of the model, and with the
 * last of them `stats`, the figures of the server.
 */
export async function* stream(path, body, key, signal) {
  const asked = {
    ...body,
    stream: true,
    return_decode_steps: true,
    return_spec_decode_stats: true,
  };
  const response = await ask(path, {
    method: "POST",
    headers: { ...headersOf(key), "content-type": "application/json" },
    body: JSON.stringify(asked),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 0);
    const [choice] = chunk.choices;
    yield {
      steps: choice?.decode_steps ?? [],
      finishReason: choice?.finish_reason ?? null,
      stats: chunk.spec_decode_stats ?? null,
    };
  }
  throw new ServerError("the server ended the text early", 0);
}

function headersOf(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /ISO-8859-1|ByteString/.test(error.message)) {
      throw new ServerError("the API key has characters that no key can have", 0);
    }
    throw new ServerError("the server does not answer", 0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(answer?.error?.message ?? `HTTP ${response.status}`, response.status);
}

/** The data of server-sent events, wherever the network cuts them. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
