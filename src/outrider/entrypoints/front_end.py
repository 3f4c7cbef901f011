"""What `LLM` and `AsyncLLM` have in common: an engine, and what a checkpoint brings besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import EngineConfig
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.chat_renderer import ChatRenderer
from outrider.entrypoints.prompt_encoder import PromptEncoder
from outrider.generation_config import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from outrider.sampling_params import SamplingParams
    from outrider.tokenizer import Tokenizer


class FrontEnd:
    """A checkpoint with the engine that runs it, its defaults, and its ways to read a prompt.

    Args:
        model: directory of the checkpoint; None is the bundled one.
        speculative_config: how to draft; None decodes plainly (K = 0).
        engine_options: as for `EngineConfig.from_kwargs`.

    Attributes:
        llm_engine: runs what is asked for.
        generation_config: what the checkpoint asks for.
        chat_renderer: turns conversations into prompts, with the checkpoint's template.

    Raises:
        OutriderError: an option or the checkpoint cannot be used.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | str | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_kwargs(
            model=model, speculative_config=speculative_config, **engine_options
        )
        self.llm_engine = LLMEngine.from_config(config)
        model_dir = BUNDLED_MODEL_DIR if config.model is None else config.model
        self.generation_config = GenerationConfig.from_pretrained(model_dir)
        self.chat_renderer = ChatRenderer(self.llm_engine.tokenizer, model_dir)
        self._encoder = PromptEncoder(self.llm_engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for."""
        return self.generation_config.sampling_params

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.llm_engine.tokenizer
