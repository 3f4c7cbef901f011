"""The Python API for event loops: `AsyncLLM`, made as `LLM` is; its methods are those of vLLM's."""

from __future__ import annotations

import asyncio
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.chat_template import ChatOptions
from outrider.entrypoints.engine_thread import EngineThread
from outrider.entrypoints.front_end import FrontEnd
from outrider.entrypoints.output_stream import OutputStream
from outrider.errors import RequestError, shown
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from os import PathLike

    from outrider.entrypoints.chat_renderer import Conversation
    from outrider.entrypoints.prompt_encoder import Prompt
    from outrider.outputs import RequestOutput


class AsyncLLM(FrontEnd):
    """A checkpoint that serves the tasks of event loops, of one after the other or of several.

    The engine steps in a thread of its own. It ends with `shutdown`, when the object is collected,
    or with the program.

    Args:
        model: directory of the checkpoint; None is the bundled one.
        speculative_config: how to draft, such as
            `{"method": "mtp", "num_speculative_tokens": 3}`; without it nothing is drafted.
        engine_options: the fields of `EngineConfig`, as for `LLM`.

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
        super().__init__(model, speculative_config=speculative_config, **engine_options)
        self._thread = EngineThread(self.llm_engine)
        # The thread holds the engine and not this object, which can so be collected.
        self._stop = weakref.finalize(self, self._thread.stop)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Decode one prompt, and yield what has come out as `output_kind` says.

        A task that is slower than the engine gets several steps at once. To cancel the task or to
        close the iterator aborts the request.

        Args:
            prompt: as for `LLM.generate`, one.
            sampling_params: None is `get_default_sampling_params()`.
            request_id: unique among the requests that are not finished.

        Raises:
            RequestError: the request cannot run.
            EngineDeadError: the engine has ended, before or meanwhile.
        """
        arrival_time = time.monotonic()
        if not self._thread.is_running:
            raise self._thread.dead_error()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {shown(params)}")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a text, got {shown(request_id)}")
        # A long text takes its time, which is not the event loop's.
        encoded = await asyncio.to_thread(self._encoder.encode_one, prompt)
        # Held until the request ends, so that the engine's thread never waits for a compiler.
        grammar = None
        if params.structured_outputs is not None:
            self.llm_engine.grammars.check_available()
            compiling = self.llm_engine.grammars.submit(params.structured_outputs)
            grammar = await asyncio.wrap_future(compiling)
        stream = OutputStream(request_id, params.output_kind, asyncio.get_running_loop())
        self._thread.add(stream, encoded, params, arrival_time)
        try:
            while True:
                output = await stream.take()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.leave(stream)
            del grammar

    def render_chat(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of one conversation, for `generate`; the arguments are those of `LLM.chat`."""
        encoded = self.chat_renderer.encode_one(
            messages,
            ChatOptions(
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            ),
        )
        return {"prompt": encoded.text, "prompt_token_ids": encoded.token_ids}

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, and return when their blocks are free.

        Their iterators yield a last output with the finish reason "abort". An id that is unknown
        or finished is no error, and one whose prompt is still being encoded is unknown: cancel the
        task that reads it.

        Raises:
            RequestError: an id is no text.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for one in request_ids:
            if not isinstance(one, str):
                raise RequestError(f"request_id must be a text, got {shown(one)}")
        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()

        def on_done() -> None:
            # A loop that is closed has nobody waiting.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(is_done.set)

        self._thread.abort(request_ids, on_done)
        await is_done.wait()

    def shutdown(self) -> None:
        """End the engine after its step at hand; requests that run get an EngineDeadError."""
        self._stop()
        self.llm_engine.grammars.close()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: neither an error nor `shutdown` has ended the engine."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether an error has ended the engine."""
        return self._thread.cause is not None
