"""The application: which address does what."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from outrider import __version__
from outrider.entrypoints.server.answer import Answer, ChoiceWriter, Sums
from outrider.entrypoints.server.chat_completions import ChatWriter
from outrider.entrypoints.server.chat_protocol import ChatBody, TokenizeBody
from outrider.entrypoints.server.completions import CompletionWriter
from outrider.entrypoints.server.disconnect import ClientGoneError, EventStream, until_disconnect
from outrider.entrypoints.server.errors import (
    ApiError,
    from_request_error,
    invalid,
    json_response,
    server_fault,
)
from outrider.entrypoints.server.message_formats import MessageFormats
from outrider.entrypoints.server.metrics import CONTENT_TYPE, ServerMetrics
from outrider.entrypoints.server.openapi import add_schema
from outrider.entrypoints.server.output_grammars import explained, field_of, structured_outputs
from outrider.entrypoints.server.prompts import PromptReader
from outrider.entrypoints.server.protocol import (
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    RequestBody,
)
from outrider.entrypoints.server.request_body import read_json_object
from outrider.entrypoints.server.request_params import ParamsBuilder
from outrider.entrypoints.server.serving import Serving
from outrider.entrypoints.server.web_page import add_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.config import ServerConfig
    from outrider.entrypoints.chat_renderer import ChatRenderer
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.entrypoints.server.engine_client import EngineClient
    from outrider.errors import RequestError
    from outrider.sampling_params import SamplingParams
    from outrider.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_Post = Callable[[Request], Awaitable[Response]]

# What nginx writes for a client that has left; nobody receives it.
_CLIENT_GONE = 499


@dataclass(frozen=True)
class ServedModel:
    """What the server knows of the checkpoint behind the engine.

    Attributes:
        tokenizer: of the checkpoint.
        model_dir: where the checkpoint lies.
        chat_renderer: of the checkpoint.
        default_params: of a request that leaves everything open.
        max_new_tokens: the checkpoint's default of the output's length; None where it names none.
        max_model_len: tokens of prompt and output together.
        max_num_seqs: completions that run at once.
        max_logprobs: the most log probabilities of a position; -1 is the whole vocabulary.
        num_speculative_tokens: drafts of a step at most; 0 where nothing is drafted.
    """

    tokenizer: Tokenizer
    model_dir: Path
    chat_renderer: ChatRenderer
    default_params: SamplingParams
    max_new_tokens: int | None
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    num_speculative_tokens: int


class Api:
    """The endpoints over one engine.

    Args:
        llm: runs the requests.
        model: its checkpoint.
        config: names and limits; it has a model name.
    """

    def __init__(self, llm: EngineClient, model: ServedModel, config: ServerConfig) -> None:
        self._model = model
        self._config = config
        self._names = config.served_model_name
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._metrics = ServerMetrics(self._names[0], llm.stats)
        self._formats = MessageFormats(config, model.tokenizer)
        self._prompts = PromptReader(
            model.tokenizer,
            model.chat_renderer,
            model.model_dir,
            config.default_chat_template_kwargs,
        )
        self._params = ParamsBuilder(model.default_params, model.max_new_tokens, model.max_logprobs)
        self.serving = Serving(llm, self._metrics, model.max_num_seqs, config.max_num_queued)

    @property
    def wants_key(self) -> bool:
        """Whether a client needs the API key."""
        return self._config.api_key is not None

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = CompletionBody.parse(await self._body(request))
        self.serving.check_open()
        body.check()
        self._check_model(body.model)
        params = self._params.of_completion(body)
        params = replace(params, structured_outputs=await structured_outputs(body))
        prompts = await self._prompts.of_completion(body.prompt)
        writer = CompletionWriter(body, prompts, self._model.tokenizer)
        return await self._answer(request, "cmpl", writer, body, prompts, params)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last message of a chat."""
        body = ChatBody.parse(await self._body(request))
        self.serving.check_open()
        body.check()
        self._check_model(body.model)
        self._formats.check(body)
        params = self._params.of_chat(body)
        prompt = await self._prompts.of_chat(
            body.messages, body.told_tools, body.chat_template_kwargs, body.reasoning_effort
        )
        form = self._formats.of(body, prompt.text or "")
        params = replace(params, structured_outputs=await structured_outputs(body, form))
        writer = ChatWriter(body, self._model.tokenizer, form, prompt.token_ids)
        return await self._answer(request, "chatcmpl", writer, body, [prompt], params)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a chat."""
        body = TokenizeBody.parse(await self._body(request))
        body.check()
        self._check_model(body.model)
        if body.messages is None:
            adds = body.add_special_tokens is not False
            token_ids = await self._prompts.encode(
                body.prompt or "", "prompt", add_special_tokens=adds
            )
        else:
            prompt = await self._prompts.of_chat(
                body.messages, body.tools or (), body.chat_template_kwargs
            )
            token_ids = prompt.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._model.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = await asyncio.to_thread(self._token_strs, token_ids)
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = DetokenizeBody.parse(await self._body(request))
        self._check_model(body.model)
        return json_response({"prompt": await asyncio.to_thread(self._detokenized, body.tokens)})

    async def models(self) -> Response:
        """The names of the model."""
        return json_response({"object": "list", "data": list(map(self._card, self._names))})

    async def model(self, name: str) -> Response:
        """One of the names."""
        self._check_model(name)
        return json_response(self._card(name))

    async def health(self) -> Response:
        """Whether requests are taken."""
        self.serving.check_alive()
        return json_response({"status": "ok"})

    async def version(self) -> Response:
        """The version of this program."""
        return json_response({"version": __version__})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _answer(
        self,
        request: Request,
        prefix: str,
        writer: ChoiceWriter,
        body: GenerationBody,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
    ) -> Response:
        """Runs a request and answers in the way that it asks for."""
        answer_id = f"{prefix}-{request.state.request_id}"
        sums = Sums(sum(len(prompt.token_ids) for prompt in prompts), body.max_tokens != 0)
        salted = [replace(prompt, cache_salt=body.cache_salt) for prompt in prompts]
        answer = Answer(writer, body, answer_id, body.model or self._names[0], sums)
        generation = self.serving.open(
            salted,
            params,
            f"{answer_id}-{next(self._numbers)}",
            _explain(body),
            shows_output=body.max_tokens != 0,
        )

        async def close() -> None:
            fields = sums.log_fields(generation.num_completions, generation.end_reason)
            request.state.log.update(fields)
            await generation.aclose()

        stream = None
        try:
            if not body.stream:
                work = answer.whole(generation)
                return json_response(await until_disconnect(request.receive, work))
            await until_disconnect(request.receive, generation.start())
            stream = EventStream(answer.events(generation), close)
            return stream
        finally:
            if stream is None:
                await close()

    def _token_strs(self, token_ids: list[int]) -> list[str]:
        tokens = [self._model.tokenizer.token_bytes(one, False) for one in token_ids]
        return [token.decode(errors="replace") for token in tokens]

    def _detokenized(self, token_ids: list[int]) -> str:
        tokenizer = self._model.tokenizer
        for index, token_id in enumerate(token_ids):
            if token_id >= tokenizer.num_tokens:
                raise invalid(
                    f"tokens[{index}]",
                    f"token id {token_id} is out of range: ids are 0 to {tokenizer.num_tokens - 1}",
                )
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json_object(request, self._config.max_body_size)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self._names[0]!r} is",
                param="model",
                code="model_not_found",
            )

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "max_model_len": self._model.max_model_len,
            "num_speculative_tokens": self._model.num_speculative_tokens,
        }


def build_app(api: Api) -> FastAPI:
    """The application of an `Api`, without what stands in front of it (`Gate`)."""
    # The pages that show a schema load scripts from elsewhere.
    app = FastAPI(
        title="Outrider",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    bodies: dict[str, tuple[_Post, type[RequestBody]]] = {
        "/v1/completions": (api.completions, CompletionBody),
        "/v1/chat/completions": (api.chat_completions, ChatBody),
        "/tokenize": (api.tokenize, TokenizeBody),
        "/detokenize": (api.detokenize, DetokenizeBody),
    }
    for path, (post, _) in bodies.items():
        app.post(path)(post)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/version")(api.version)
    app.get("/metrics")(api.metrics)
    add_page(app)
    add_schema(app, {path: body for path, (_, body) in bodies.items()}, api.wants_key)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)
    return app


def _explain(body: GenerationBody) -> Any:
    names = {}
    if isinstance(body, ChatBody):
        names = {"logprobs": "top_logprobs"}
        if body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
    fields = type(body).model_fields

    def explain(error: RequestError) -> ApiError:
        if str(error).startswith("structured_outputs"):
            return explained(error, field_of(body))
        return from_request_error(error, fields, names)

    return explain


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for nothing else"
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    message = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not allowed at {request.url.path}",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _on_client_gone(_: Request, error: Exception) -> Response:
    del error
    return Response(status_code=_CLIENT_GONE)


async def _on_fault(request: Request, error: Exception) -> Response:
    logger.error("request %s failed: %r", request.state.request_id, error)
    return server_fault().response()
