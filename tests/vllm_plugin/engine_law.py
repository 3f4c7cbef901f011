"""Program: samples one prompt many times with vLLM and drafts, and says how well the law is met.

Arguments: the rule, and how many requests. The last line of the output is JSON: the p-value of the
texts against the law that the target gives them, and what the drafts brought.
"""

import json
import sys
from typing import Any

import torch

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.vllm_plugin import block_verification
from tests.chi_square import chi_square_p_value

PROMPT = "import os\n\n\ndef main(path):\n    if"
NUM_DRAFTS, LENGTH, TOP_K = 3, 4, 3


def exact_law(llm: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of each text of LENGTH tokens among the TOP_K likeliest at every place."""
    from vllm import SamplingParams

    law: dict[tuple[int, ...], float] = {(): 1.0}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP_K)
    for _ in range(LENGTH):
        texts = [*law]
        prompts = [{"prompt_token_ids": [*prompt, *text]} for text in texts]
        longer = {}
        for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            listed = sorted(output.outputs[0].logprobs[0].items(), key=lambda one: -one[1].logprob)
            ids = [token_id for token_id, _ in listed[:TOP_K]]
            logprobs = torch.tensor([one.logprob for _, one in listed[:TOP_K]]).double()
            for token_id, prob in zip(ids, logprobs.softmax(0).tolist(), strict=True):
                longer[*text, token_id] = law[text] * prob
        law = longer
    return law


def count_blocks() -> list[int]:
    """[0], which grows by one for each batch that is verified by block."""
    num_blocks, verify_block = [0], block_verification.verify_block

    def counting(*arguments: Any) -> Any:
        num_blocks[0] += 1
        return verify_block(*arguments)

    block_verification.verify_block = counting
    return num_blocks


def main(rule: str, num_requests: int) -> None:
    from vllm import LLM, SamplingParams

    num_blocks = count_blocks()

    llm = LLM(
        str(BUNDLED_MODEL_DIR),
        dtype="float32",
        max_model_len=128,
        disable_log_stats=False,
        enforce_eager=True,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": NUM_DRAFTS,
            "rejection_sample_method": rule,
            "draft_sample_method": "probabilistic",
        },
    )
    prompt = llm.get_tokenizer().encode(PROMPT)
    law = exact_law(llm, prompt)
    params = SamplingParams(temperature=1, top_k=TOP_K, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt}] * num_requests, params, use_tqdm=False)
    counts = dict.fromkeys(law, 0)
    num_foreign = 0
    for output in outputs:
        text = tuple(output.outputs[0].token_ids)
        num_foreign += text not in counts
        counts[text] = counts.get(text, 0) + 1
    # Texts that are too rare for the test are one.
    common = [text for text in law if law[text] * num_requests >= 5]
    probs = [*(law[text] for text in common), 1 - sum(law[text] for text in common)]
    seen = [*(counts[text] for text in common), num_requests - sum(counts[t] for t in common)]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    report = {
        "p_value": chi_square_p_value(torch.tensor(seen), torch.tensor(probs)),
        "num_texts": len(common),
        "num_foreign": num_foreign,
        "num_blocks": num_blocks[0],
        "num_drafts": metrics["vllm:spec_decode_num_drafts"],
        "num_accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
    }
    sys.stdout.write(f"{json.dumps(report)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
