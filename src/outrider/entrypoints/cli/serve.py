"""`outrider serve`: the OpenAI API over HTTP."""

from typing import Annotated

import typer

from outrider.config import EngineConfig, ServerConfig
from outrider.entrypoints.cli.options import (
    DraftsPerStep,
    Options,
    take_speculative_options,
    takes_engine_options,
    takes_server_options,
)
from outrider.errors import ConfigError

# The modules of the extra `server`, whose absence is told in one line.
_EXTRA = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")


@takes_engine_options()
@takes_server_options
def serve(
    served_model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory of the checkpoint, as --model.",
            show_default=False,
        ),
    ] = None,
    *,
    num_speculative_tokens: DraftsPerStep = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes requests without a seed of their own reproducible, in their order.",
            show_default="entropy",
        ),
    ] = None,
    engine_options: Options,
    server_options: Options,
) -> int:
    """Serve a checkpoint with the API of OpenAI, until SIGINT or SIGTERM.

    /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /version
    and /metrics. Requests that run at the end have --shutdown-timeout-s to finish.
    """
    if engine_options.setdefault("model", served_model) != (
        served_model or engine_options["model"]
    ):
        raise ConfigError(
            f"MODEL {served_model} and --model {engine_options['model']}: give one of the two"
        )
    engine_options["seed"] = seed
    # What can be wrong without a checkpoint is told before one is loaded.
    EngineConfig.from_kwargs(**engine_options)
    config = ServerConfig.from_kwargs(**server_options)
    speculative = take_speculative_options(num_speculative_tokens, engine_options)
    try:
        from outrider.entrypoints.server.run import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ConfigError(
            f"the server needs {error.name}: pip install 'outrider[server]'"
        ) from None
    run_server(config, {**engine_options, "speculative_config": speculative})
    return 0
