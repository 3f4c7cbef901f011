"""Runs the server until a signal ends it: first politely, at the deadline by force."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.chat_template import ChatOptions, ChatTemplate
from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.app import Api, ServedModel, build_app
from outrider.entrypoints.server.connection import BoundedConnection
from outrider.entrypoints.server.engine_client import AsyncLLMClient
from outrider.entrypoints.server.gate import Gate
from outrider.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from outrider.config import ServerConfig

logger = logging.getLogger(__name__)

# Past the deadline, for the answers to aborted requests to go out.
_LAST_WORDS_S = 5
_KEEP_ALIVE_S = 30
# Connections that the system holds until they are accepted.
_BACKLOG = 2048


def serve(config: ServerConfig, engine_options: dict[str, Any]) -> None:
    """Loads a checkpoint and serves it until SIGINT or SIGTERM.

    Args:
        config: how to listen.
        engine_options: those of `AsyncLLM`.

    Raises:
        OutriderError: an option or the checkpoint cannot be used, or the address is taken.
    """
    # An address that is taken is told before the checkpoint is loaded, which takes longer.
    with bind(config) as listener:
        model = engine_options.get("model")
        model_dir = BUNDLED_MODEL_DIR if model is None else Path(model)
        config = config.with_model_name(model_name(None if model is None else model_dir))
        check_template_kwargs(config.default_chat_template_kwargs, model_dir)
        llm = AsyncLLM(**engine_options)
        try:
            api = Api(AsyncLLMClient(llm), served_model(llm, model_dir), config)
            server = Server(api, config)
            listen(listener, config)
            logger.info("serving %s on %s", config.served_model_name[0], _url(listener))
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            llm.shutdown()


def model_name(model_dir: Path | None) -> str:
    """What a checkpoint is called where nobody says it; None is the bundled one."""
    # The root of a file system has no name.
    return "outrider" if model_dir is None else model_dir.resolve().name or "outrider"


def check_template_kwargs(template_kwargs: Mapping[str, Any], model_dir: Path) -> None:
    """Refuses what no chat template of a checkpoint reads.

    Raises:
        OutriderError: names the variable, or the template that is wrong or missing.
    """
    if not template_kwargs:
        return
    template, known = ChatTemplate.from_pretrained(model_dir), set[str]()
    # There may be one of its own for chats with tools.
    for options in (ChatOptions(), ChatOptions(tools=[{}])):
        with suppress(RequestError):
            known |= template.variables(options)
    for name in template_kwargs:
        if name not in known:
            raise ConfigError(
                f"default_chat_template_kwargs: the chat template of {model_dir} reads no "
                f"variable {shown(name)}; those that it reads: {', '.join(sorted(known)) or 'none'}"
            )


def served_model(llm: AsyncLLM, model_dir: Path) -> ServedModel:
    """What the server needs to know of the checkpoint behind an engine."""
    engine = llm.llm_engine
    return ServedModel(
        tokenizer=engine.tokenizer,
        model_dir=model_dir,
        chat_renderer=llm.chat_renderer,
        default_params=llm.get_default_sampling_params(),
        max_new_tokens=llm.generation_config.max_new_tokens,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.config.max_num_seqs,
        max_logprobs=engine.config.max_logprobs,
        num_speculative_tokens=engine.config.num_speculative_tokens,
    )


def bind(config: ServerConfig) -> socket.socket:
    """The socket of the server, bound to its address; nobody can connect to it yet.

    Raises:
        ConfigError: the address is taken, or not of this machine.
    """
    with _named_address(config):
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # A port whose last server has just ended is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address[:2])
        except OSError:
            listener.close()
            raise
        return listener


def listen(listener: socket.socket, config: ServerConfig) -> None:
    """Lets clients connect, from now on and not before the model can answer.

    Raises:
        ConfigError: another server began to listen at the same address first.
    """
    with _named_address(config):
        listener.listen(_BACKLOG)


@contextmanager
def _named_address(config: ServerConfig) -> Generator[None, None, None]:
    """Errors of sockets as one line that names the address."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"host {config.host}, port {config.port}: {error.strerror or error}"
        ) from None


class Server(uvicorn.Server):
    """uvicorn, which at its end aborts what still runs at the deadline.

    Args:
        api: what is served.
        config: how.
    """

    def __init__(self, api: Api, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                Gate(build_app(api), config),
                http=BoundedConnection,
                ws="none",
                # Its own lines are left to the program's logging.
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=config.shutdown_timeout_s + _LAST_WORDS_S,
            )
        )
        self._serving = api.serving
        self._deadline_s = config.shutdown_timeout_s
        self._hurry = asyncio.Event()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing more, waits for what runs, and aborts it at the deadline."""
        self._serving.is_draining = True
        aborting = asyncio.create_task(self._abort_at_deadline())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()
            with suppress(asyncio.CancelledError):
                await aborting

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ends at a signal with exit code 0; at a second one without waiting for the deadline."""
        signals = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True

    async def _abort_at_deadline(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._deadline_s)
        await self._serving.abort_all()


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
