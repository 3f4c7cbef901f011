"""The Python API: `LLM`, with the names and the results of vLLM's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.chat_template import ChatOptions
from outrider.config import SpeculativeConfig
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.front_end import FrontEnd
from outrider.errors import RequestError, shown
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.entrypoints.chat_renderer import Conversation
    from outrider.entrypoints.prompt_encoder import EncodedPrompt, Prompt
    from outrider.outputs import RequestOutput


class LLM(FrontEnd):
    """A checkpoint, ready to decode.

    Without `speculative_config` it decodes plainly (K = 0).

    Args:
        model: directory of the checkpoint; None is the bundled one.
        speculative_config: how to draft, such as
            `{"method": "mtp", "num_speculative_tokens": 3}`.
        engine_options: the fields of `EngineConfig`, and vLLM's options where they ask for what
            this build does anyway; an unknown one is an error.

    Raises:
        OutriderError: an option or the checkpoint cannot be used.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Decode prompts to their end, together.

        Args:
            prompts: one or several. Each is a text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`, the last two with a `cache_salt` if wanted: only
                prompts with the same salt share what was run of them.
            sampling_params: for all prompts, or one for each; None is
                `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One result for each prompt, in their order.

        Raises:
            RequestError: one of the prompts cannot run; none has run then.
        """
        return self._run(self.encode_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations, in the words of the checkpoint's chat template.

        Args:
            messages: one conversation or several, each a list of objects with role and content. A
                content is a text, or a list of parts of the type text.
            sampling_params: for all conversations, or one for each; None is
                `get_default_sampling_params()`.
            chat_template: another template, or the name of one of the checkpoint's.
            add_generation_prompt: begin an answer after the messages.
            continue_final_message: go on with the last message instead.
            tools: JSON schemas of functions that the template may offer.
            chat_template_kwargs: further variables of the template.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One result for each conversation, in their order.

        Raises:
            RequestError: one of them cannot run; none has run then.
            CheckpointError: the checkpoint's chat template is no valid one.
        """
        encoded = self.chat_renderer.encode(
            messages,
            ChatOptions(
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            ),
        )
        return self._run(encoded, sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forget what was run of earlier prompts; the next ones run as in a new engine."""
        self.llm_engine.reset_prefix_cache()

    def with_num_speculative_tokens(self, k: int) -> LLM:
        """The same weights with another number of drafts, and with caches of their own.

        Args:
            k: drafts per step; 0 decodes plainly.
        """
        speculative = self.llm_engine.config.speculative or SpeculativeConfig()
        return self.with_speculative(replace(speculative, num_speculative_tokens=k) if k else None)

    def with_speculative(self, speculative: SpeculativeConfig | None) -> LLM:
        """The same weights with another way to draft, and with caches of their own.

        Args:
            speculative: None decodes plainly.

        Raises:
            ConfigError: the head is to draft, and the weights were loaded without it.
        """
        engine = self.llm_engine
        config = replace(engine.config, speculative=speculative)
        other = copy.copy(self)
        other.llm_engine = LLMEngine(config, engine.model, engine.tokenizer)
        return other

    def encode_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        """Turn prompts of every accepted form into token ids.

        Errors name the index of the prompt, unless it was given alone.
        """
        return self._encoder.encode(prompts)

    def _run(
        self, encoded: list[EncodedPrompt], sampling_params: object, use_tqdm: bool
    ) -> list[RequestOutput]:
        params = self._params_for_each(len(encoded), sampling_params)
        with _progress(use_tqdm, len(encoded)) as on_finish:
            return DecodeRun(self.llm_engine, on_finish=on_finish).run(encoded, params)

    def _params_for_each(self, num_prompts: int, params: object) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        given = list(params) if isinstance(params, Sequence) else [params]
        listed = [one for one in given if isinstance(one, SamplingParams)]
        if len(listed) != len(given):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, got {shown(params)}"
            )
        if len(listed) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(listed)} entries for {num_prompts} prompts: "
                "give one for all, or one for each"
            )
        return listed


@contextmanager
def _progress(is_shown: bool, num_prompts: int) -> Iterator[Callable[[int], object] | None]:
    """A progress bar on stderr; yields what to call when a prompt has ended."""
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    bar = Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)
    )
    with bar:
        task = bar.add_task("Prompts", total=num_prompts)
        yield lambda _: bar.advance(task)
