"""Seeds of requests whose prompts are read in pieces.

vLLM samples after every piece, and drafts after it, and throws away what comes out but for the last
piece. It then sets the generator of a request with a seed back by one draw, which generators of the
CPU cannot do: the engine ends. The draws of drafts, which block-verification makes from the same
generator, stay. With this hook such a request has no generator while a piece is sampled, so that
its text does not depend on how many pieces there were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import own_part_of_platform, replace

if TYPE_CHECKING:
    from collections.abc import Callable


def obstacle() -> str | None:
    """Platforms that are plugins themselves, such as Ascend, bring their own model runner."""
    return own_part_of_platform("model runner")


def install() -> None:
    """Takes the generators out where sampling, drafting and setting back are called from."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "sample_tokens", _without_pieces)


def _without_pieces(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    def without_pieces(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        is_piece = self.discard_request_mask.np[: self.input_batch.num_reqs]
        kept = {
            index: generators.pop(index)
            for index in is_piece.nonzero()[0].tolist()
            if index in generators
        }
        try:
            return sample_tokens(self, *args, **kwargs)
        finally:
            generators.update(kept)

    return without_pieces
