"""Completions as JSON, log probabilities in the form of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.logprobs import Logprob, LogprobsOfPosition
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.tokenizer import Tokenizer

# In the place of -inf, which JSON does not know; vLLM's server writes the same.
LEAST_LOGPROB = -9999.0


def outputs_as_json(
    outputs: list[RequestOutput], num_logprobs: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """One object for each completion, in the order of the prompts.

    Args:
        outputs: of whole requests.
        num_logprobs: likeliest tokens that were asked for at each position, -1 all.
        tokenizer: spells the tokens of log probabilities.
    """
    return [
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_index": prompt_index,
            "index": completion.index,
            **_logprobs(output, completion, num_logprobs, tokenizer),
        }
        for prompt_index, output in enumerate(outputs)
        for completion in output.outputs
    ]


def _logprobs(
    output: RequestOutput, completion: CompletionOutput, num_logprobs: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The keys that are there where they were asked for."""
    value: dict[str, Any] = {}
    if completion.logprobs is not None:
        positions = [_position(one, num_logprobs, tokenizer) for one in completion.logprobs]
        value["logprobs"] = {"content": positions}
        value["cumulative_logprob"] = completion.cumulative_logprob
    if output.prompt_logprobs is not None:
        value["prompt_logprobs"] = [_prompt_position(one) for one in output.prompt_logprobs]
    return value


def _position(logprobs: LogprobsOfPosition, num_asked: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The chosen token, and beside it the likeliest, of which it may be one."""
    entries = [_entry(token_id, one, tokenizer) for token_id, one in logprobs.items()]
    is_apart = 0 <= num_asked < len(entries)
    likeliest = entries[1:] if is_apart else sorted(entries, key=lambda entry: entry["rank"])
    return {**entries[0], "top_logprobs": likeliest}


def _entry(token_id: int, logprob: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token_id": token_id,
        "token": logprob.decoded_token,
        "logprob": max(logprob.logprob, LEAST_LOGPROB),
        "rank": logprob.rank,
        "bytes": list(tokenizer.token_bytes(token_id, skip_special_tokens=False)),
    }


def _prompt_position(logprobs: LogprobsOfPosition | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {
        str(token_id): {
            "logprob": max(one.logprob, LEAST_LOGPROB),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for token_id, one in logprobs.items()
    }
