"""The HTTP server: OpenAI's API over `AsyncLLM`.

A request passes, in this order: `gate` (host, key, size, deadline), `request_body` (strict JSON),
`protocol` (strict fields), `prompts` (token ids), `serving` (queue, engine, disconnect), and
`completions` or `chat_completions`, which write the answer.
"""
